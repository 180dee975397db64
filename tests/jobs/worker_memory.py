"""Memory of workers on one machine, by the kernel's count (PSS: a page that several processes have counts once):
python -m tests.jobs.worker_memory MODEL_DIR [workers=2] [rows=48].

One worker, several commands with weights of their own, and one command whose workers have them in common; all make the
same rows.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from jobs.record.run_dir import RunDirectory
from runtime.units import KIB, format_bytes
from tests.generations import read_generations

SECONDS_PER_LOOK = 0.2


def settings(model: str, home: str, name: str, num_rows: int) -> list[str]:
    run = [f"run={name}", f"output_root={home}", "workers=elastic", "log_level=warning"]
    rows = ["dataset=sample", "dataset.limit=12", f"dataset.repeat={num_rows // 12}"]
    policy = ["policy=fixed", "policy.micro_batch_size=4", "policy.num_micro_batches=1"]
    sampling = ["sampling.max_new_tokens=16", "sampling.ignore_eos=true"]
    return ["model=hf", f"model.path={model}", "offload=cpu", *run, *rows, *policy, *sampling]


def pids_below(pid: int) -> list[int]:
    pids = [pid]
    with suppress(OSError):
        for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pids += pids_below(int(word))
    return pids


def pss_bytes(pids: Sequence[int]) -> int:
    total = 0
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * KIB for line in lines if line.startswith("Pss:"))
    return total


def measured(commands: Sequence[Sequence[str]]) -> tuple[int, float]:
    """The most memory of all processes together, in bytes, and how long they took, in seconds."""
    began, most = time.monotonic(), 0
    running = [
        subprocess.Popen([sys.executable, "-m", "jobs.generate", *each], stdout=subprocess.DEVNULL) for each in commands
    ]
    while any(each.poll() is None for each in running):
        most = max(most, pss_bytes([pid for each in running for pid in pids_below(each.pid)]))
        time.sleep(SECONDS_PER_LOOK)
    codes = [each.returncode for each in running]
    assert not any(codes), f"they ended with {codes}"
    return most, time.monotonic() - began


def main(words: Sequence[str]) -> None:
    model, options = words[0], {name: int(value) for name, _, value in (word.partition("=") for word in words[1:])}
    count, num_rows = options.get("workers", 2), options.get("rows", 48)
    with tempfile.TemporaryDirectory() as home:
        one, own, common = (settings(model, home, name, num_rows) for name in ("one", "own", "common"))
        alone = [f"machine.num_threads={max(1, 2 // count)}"]
        ways = {"one": [one], "own": [[*own, *alone]] * count, "common": [[*common, f"num_workers={count}"]]}
        for name, commands in ways.items():
            num_bytes, seconds = measured(commands)
            print(f"{name:<8} {format_bytes(num_bytes):>10} at most, {seconds:.0f} s", flush=True)
        tables = [read_generations(RunDirectory(path=Path(home) / "generate" / name)) for name in ways]
        assert all(table.equals(tables[0]) for table in tables), "rows differ"
    print(f"{num_rows} rows each, all equal")


if __name__ == "__main__":
    main(sys.argv[1:])
