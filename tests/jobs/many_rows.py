"""What many rows cost a run: memory, seconds to its first block, and to its status:
python -m tests.jobs.many_rows [rows=10000000] [few=1000] [window_rows=200000] [kind=jsonl] [windows=1] [folder=DIR].

Short rows with ids of their own in eight files. The run is killed once `windows` windows are done and the next one has
a block, goes on, and is killed again behind another block. `few` is a run of so many rows with blocks of the same size:
what the run of many takes beyond its peak is what rows take.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.record.run_dir import RunDirectory

NUM_FILES, BLOCK_ROWS, MOST_ROWS, MOST_STATUS_SECONDS = 8, 1000, 1 << 30, 10.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of `num_rows` rows in `home`."""

    home: Path
    name: str
    num_rows: int
    window_rows: int
    kind: str

    @property
    def directory(self) -> RunDirectory:
        """Where the run lies."""
        return RunDirectory(path=self.home / "generate" / self.name)

    def write(self) -> None:
        """The input."""
        folder, each = self.home / f"input-{self.name}", -(-self.num_rows // NUM_FILES)
        folder.mkdir()
        for number in range(NUM_FILES):
            some = range(number * each, min((number + 1) * each, self.num_rows))
            path = folder / f"part-{number}.{self.kind}"
            if self.kind == "jsonl":
                with path.open("w") as file:
                    file.writelines(f'{{"key": "row-{i}", "prompt": "{i % 97}+{i % 89}="}}\n' for i in some)
            elif some:
                prompts = [f"{i % 97}+{i % 89}=" for i in some]
                pq.write_table(pa.table({"key": [f"row-{i}" for i in some], "prompt": prompts}), path)

    def start(self) -> subprocess.Popen[bytes]:
        """What the command does."""
        dataset = (f"dataset={self.kind}", f"dataset.path={self.home}/input-{self.name}", "dataset.id_field=key")
        policy = ("policy=fixed", f"policy.micro_batch_size={BLOCK_ROWS // 4}", "policy.num_micro_batches=4")
        sampling = ("sampling.max_new_tokens=1", "offload.host_memory_gib=4")
        windows = () if self.window_rows >= self.num_rows else (f"dataset.window_rows={self.window_rows}",)
        run = (f"run={self.name}", f"output_root={self.home}", "log_level=warning")
        words = [sys.executable, "-m", "jobs.generate", *run, *dataset, *policy, *sampling, *windows]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL)

    def num_parts(self) -> int:
        """Blocks that are committed."""
        with suppress(FileNotFoundError):
            return sum(not path.name.startswith(".") for path in self.directory.generations.iterdir())
        return 0


@dataclass(kw_only=True)
class Watched:
    """A process, and the most memory that it was seen to have had."""

    process: subprocess.Popen[bytes]
    began: float
    peak_bytes: int = 0

    def until(self, num_parts: int, case: Case) -> float:
        """Seconds since its start at which the run has so many parts, or has ended."""
        while self.process.poll() is None and case.num_parts() < num_parts:
            self._look()
            time.sleep(0.05)
        self._look()
        return time.monotonic() - self.began

    def kill(self) -> None:
        """Ends it at once."""
        self._look()
        self.process.kill()
        self.process.wait()

    def _look(self) -> None:
        with suppress(OSError):
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            peak = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
            self.peak_bytes = max(self.peak_bytes, peak)


def watched(case: Case) -> Watched:
    """A start of the run."""
    began = time.monotonic()
    return Watched(process=case.start(), began=began)


def status_of(case: Case) -> tuple[float, dict[str, object]]:
    """Seconds that the command takes, and what it says."""
    began = time.monotonic()
    words = [sys.executable, "-m", "jobs.status", f"run={case.directory.path}", "format=json"]
    process = subprocess.run(words, capture_output=True, text=True, check=True)
    return time.monotonic() - began, json.loads(process.stdout)[0]


def measure(many: Case, few: Case, num_windows: int) -> Iterator[str]:
    """Lines of what was measured. Raises AssertionError where it is too much."""
    for case in (many, few):
        case.write()
    small = watched(few)
    small.until(-(-few.num_rows // BLOCK_ROWS) + 1, few)
    assert small.process.wait() == 0, "the run of few rows failed"
    yield f"{few.num_rows:,} rows: peak {small.peak_bytes / 2**20:,.0f} MiB"
    first = watched(many)
    seconds = first.until(1, many)
    yield f"{many.num_rows:,} rows of {many.kind}: first block after {seconds:.1f} s, peak {_above(first, small)}"
    parts = num_windows * -(-many.window_rows // BLOCK_ROWS) + 1
    seconds = first.until(parts, many)
    assert first.process.poll() is None, "the run ended before it could be killed: ask for fewer windows"
    yield f"block {parts:,}, behind {num_windows} windows, after {seconds:.1f} s, peak {_above(first, small)}"
    elapsed, status = status_of(many)
    counts = f"{status['num_rows_done']:,} of {status['num_rows']:,} rows done"
    yield f"status while it runs: {elapsed:.1f} s, {counts}"
    first.kill()
    assert first.peak_bytes - small.peak_bytes < MOST_ROWS, "rows take a GiB"
    num_parts = many.num_parts()
    again = watched(many)
    seconds = again.until(num_parts + 1, many)
    yield f"killed with {num_parts:,} blocks; gone on: next block after {seconds:.1f} s, peak {_above(again, small)}"
    again.kill()
    assert max(elapsed, status_of(many)[0]) < MOST_STATUS_SECONDS, "the status takes too long"


def _above(one: Watched, other: Watched) -> str:
    return (
        f"{one.peak_bytes / 2**20:,.0f} MiB, {(one.peak_bytes - other.peak_bytes) / 2**20:,.0f} MiB more than few rows"
    )


def main(words: Sequence[str]) -> None:
    options = dict(word.split("=", 1) for word in words)
    with tempfile.TemporaryDirectory(dir=options.get("folder")) as home:
        cases = [
            Case(
                home=Path(home),
                name=name,
                num_rows=int(options.get(key, default)),
                window_rows=int(options.get("window_rows", "200000")),
                kind=options.get("kind", "jsonl"),
            )
            for name, key, default in (("many", "rows", "10000000"), ("few", "few", "1000"))
        ]
        for line in measure(cases[0], cases[1], int(options.get("windows", "1"))):
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
