"""Kills an evaluation by lm-evaluation-harness at any moment, in each kind of requests, and holds what it comes to
against one that nothing ended: python -m tests.jobs.kill_evaluate kills=5 documents=240 seed=0

`kills`: within each kind, as the run directory says that is being written. Numbers and samples must be equal, what is
committed keeps its bytes and is not computed again, and a kill costs at most the block that was being computed.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from jobs.config.process import tuned_environment
from jobs.record.run_dir import RunDirectory
from tests.jobs.computed_rows import noted
from tests.jobs.harness_tasks import NUMBERS, write_tasks
from tests.support import synthesize

TASKS = {  # by the directories of their runs, in the harness' order
    "loglikelihood": "choice_of_words",
    "loglikelihood_rolling": "perplexity",
    "generate_until-0": "until_a_stop",
}
SETTINGS = [
    "model=hf",
    "model.self_check=off",  # its passes are of no row
    "offload=nvme",
    "offload.resident_layers=0",
    "policy=fixed",
    "policy.micro_batch_size=4",
    "policy.num_micro_batches=2",
    "policy.prefill_chunk_tokens=512",  # not as each run's own measurement has it: numbers are compared to the last bit
    "checkpoint_seconds=null",
    "harness.bootstrap_iters=0",
]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
Parts = Mapping[Path, str]


@dataclass(kw_only=True)
class Tally:
    """What has happened in one kind of requests. `num_lost`: blocks that a kill has interrupted, which the next start
    computed once more. `num_parts`: what was committed at each kill."""

    num_kills: int = 0
    num_lost: int = 0
    num_parts: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Case:
    home: Path
    num_documents: int

    def make_inputs(self) -> None:
        synthesize("llama", self.home / "model", **SIZES)
        (self.home / "tasks").mkdir()
        drawn = random.Random(1)
        write_tasks(self.home / "tasks", [_document(index, drawn) for index in range(self.num_documents)])

    def start(self, name: str, notes: Path) -> subprocess.Popen[bytes]:
        """`python -m jobs.evaluate` with the same words each time."""
        words = [*SETTINGS, f"model.path={self.home / 'model'}", f"tasks=[{','.join(TASKS.values())}]"]
        words += [f"harness.include_path=[{self.home / 'tasks'}]", f"output_root={self.home}", f"run={name}"]
        environment = tuned_environment(os.environ) | {"HF_HOME": str(self.home / "hub"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "tests.jobs.computed_rows", str(notes), "jobs.evaluate", *words]
        with (self.home / "log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def run(self, name: str, kind: str) -> RunDirectory:
        return RunDirectory(path=self.home / "evaluate" / name / kind)

    def require_success(self, process: subprocess.Popen[bytes]) -> None:
        log = (self.home / "log").read_text()
        assert process.wait() == 0, f"ended with {process.returncode}: {log[-2000:]}"

    def results(self, name: str) -> dict[str, Any]:
        """What the harness computed, by task, and of its samples all that was asked and answered."""
        directory = self.home / "evaluate" / name
        computed = json.loads((directory / "results.json").read_text())
        return {task: (computed["results"][task], self._samples(directory, task)) for task in TASKS.values()}

    def _samples(self, directory: Path, task: str) -> list[Any]:
        (file,) = directory.glob(f"harness/*/samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(samples) == self.num_documents, f"{len(samples)} samples of {task}"
        return samples


def _document(index: int, drawn: random.Random) -> dict[str, object]:
    """One that no other is like, with a text of 20 to 120 letters."""
    text = "".join(drawn.choices("abcdefgh ", k=drawn.randint(20, 120)))
    return {
        "question": f"{index}: {text}",
        "text": text,
        "choices": drawn.sample(NUMBERS, 3),
        "answer": index % 3,
    }


class Starts:
    """The starts of one evaluation, up to its end."""

    def __init__(self, case: Case, name: str, tallies: Mapping[str, Tally], moments: random.Random):
        self._case, self._name, self._tallies, self._moments = case, name, tallies, moments
        self._parts: Parts = {}
        self._num_starts = 0

    def go_on(self, seconds: Mapping[str, float], num_kills: int) -> bool:
        """One start; True where it came to its end. `seconds`: about how long each kind takes, `num_kills`: in each."""
        notes = self._case.home / f"{self._name}-{self._num_starts}.jsonl"
        self._num_starts += 1
        process = self._case.start(self._name, notes)
        kind = self._wait_for_work(process, notes, num_kills)
        if kind is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._moments.uniform(0, seconds[kind] / (num_kills + 1)))
            process.kill()
        is_killed = process.wait() == -signal.SIGKILL
        self._audit(notes)
        if is_killed:
            self._count_kill()
        else:
            self._case.require_success(process)
        return not is_killed

    def _wait_for_work(self, process: subprocess.Popen[bytes], notes: Path, num_kills: int) -> str | None:
        """The kind that is computed, once it is one that lacks kills; None where the process has ended."""
        while process.poll() is None:
            *_, kind = ["", *(kind for kind, _ in noted(notes))]
            if kind and self._tallies[kind].num_kills < num_kills:
                return kind
            time.sleep(0.02)
        return None

    def _count_kill(self) -> None:
        """Counts it to the kind whose run is begun and has not finished; to none where it fell between two."""
        for kind in TASKS:
            run = self._case.run(self._name, kind)
            if run.manifest.exists() and not run.success.exists():
                self._tallies[kind].num_kills += 1
                self._tallies[kind].num_parts.append(sum(part.parent == run.generations for part in self._parts))

    def _audit(self, notes: Path) -> None:
        """Holds what a start has done against the parts that it found: they have their bytes, and no row of theirs was
        computed. Of what it computed all is committed but for one block."""
        computed = {(kind, block) for kind, ids in set(noted(notes)) for block in self._blocks(kind, ids)}
        before, self._parts = self._parts, self._committed()
        assert before.items() <= self._parts.items(), "a part that was committed is lost or has other bytes"
        again = [each for each in computed if self._part(*each) in before]
        assert not again, f"these were committed and are computed again: {again}"
        lost = [each for each in computed if self._part(*each) not in self._parts]
        assert len(lost) <= 1, f"one kill has cost {lost}"
        for kind, _ in lost:
            self._tallies[kind].num_lost += 1

    def _blocks(self, kind: str, ids: frozenset[str]) -> set[int]:
        plan = pq.read_table(self._case.run(self._name, kind).plan, columns=["row_id", "block"]).to_pydict()
        block_of = dict(zip(plan["row_id"], plan["block"], strict=True))
        return {block_of[each] for each in ids}

    def _part(self, kind: str, block: int) -> Path:
        return self._case.run(self._name, kind).generations_part(block)

    def _committed(self) -> Parts:
        runs = [self._case.run(self._name, kind) for kind in TASKS]
        paths = [path for run in runs for path in run.generations.glob("part-*.parquet")]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def loop(case: Case, *, num_kills: int, seed: int) -> Mapping[str, Tally]:
    """Raises AssertionError where an evaluation came to anything else than the one that nothing ended."""
    tallies, moments = {kind: Tally() for kind in TASKS}, random.Random(seed)
    case.make_inputs()
    case.require_success(case.start("whole", case.home / "whole.jsonl"))
    expected = case.results("whole")
    seconds = {kind: _seconds(case.run("whole", kind)) for kind in TASKS}
    print(f"not killed: {', '.join(f'{kind} {value:.1f} s' for kind, value in seconds.items())}", flush=True)
    num_runs = 0
    while any(tally.num_kills < num_kills for tally in tallies.values()):
        name = f"killed-{num_runs}"
        num_runs += 1
        starts = Starts(case, name, tallies, moments)
        while not starts.go_on(seconds, num_kills):
            pass
        for task, (numbers, samples) in case.results(name).items():
            assert numbers == expected[task][0], f"{name}: other numbers of {task}: {numbers}"
            assert samples == expected[task][1], f"{name}: other samples of {task}"
    return tallies


def _seconds(run: RunDirectory) -> float:
    """How long its blocks took, from the first pass on."""
    return run.success.stat().st_mtime - run.schedule.stat().st_mtime


def main() -> None:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    kills, documents, seed = (
        int(options.get(key, default)) for key, default in (("kills", 5), ("documents", 240), ("seed", 0))
    )
    with tempfile.TemporaryDirectory(prefix="weightstream-kill-evaluate-") as home:
        case = Case(home=Path(home), num_documents=documents)
        for kind, tally in loop(case, num_kills=kills, seed=seed).items():
            num_blocks = len(list(case.run("whole", kind).generations.glob("part-*.parquet")))
            print(
                f"{kind}: {tally.num_kills} kills at {tally.num_parts} of {num_blocks} committed blocks; numbers and "
                f"{documents} samples equal; {tally.num_lost} blocks computed twice, none that was committed"
            )


if __name__ == "__main__":
    main()
