"""Ends runs again and again, at any moment, and holds what they come to against a run that nothing ended:
python -m tests.jobs.kill_loop kills=40 stops=20 family=llama kv=auto seconds=0.3 prompts=shared admission=wave
drafts=4 temperature=0.8

`job`: generate, whose run is one long block, score or encode, in several. `windows`: how many of the 12 rows are read
at a time; null is all. `family`: llama goes in packed lanes, bloom in padded ones, t5 behind an encoder. `prompts`:
bundled ones, or such as begin alike. With `admission=continuous` there are two blocks, and as many seats as one has.
`drafts`: tokens that are guessed in each pass, and none in the run that nothing ended.
What a kill may cost is the time since the run was last saved; what a stop may cost is a pass, so that no token is
recorded twice. Where prompts are only read it may be the block.
"""

import logging
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pyarrow.parquet as pq

from jobs.config.signals import StopFlag
from jobs.record.run_dir import RunDirectory
from runtime.config.settings import Admission, KVTier
from runtime.errors import Interrupted
from tests.jobs.kill_case import Case
from tests.processes import PROCESSES

SLACK_SECONDS = 1.0  # the machine has others to serve


@dataclass(kw_only=True)
class Tally:
    """What has happened. `ages_seconds`: between the last save, or the start, and each kill."""

    num_kills: int = 0
    num_stops: int = 0
    num_runs: int = 0
    num_resumed_inside: int = 0
    ages_seconds: list[float] = field(default_factory=list)
    longest_pass_seconds: float = 0.0

    def __str__(self) -> str:
        oldest = max(self.ages_seconds, default=0)
        return (
            f"{self.num_kills} kills, {self.num_stops} stops in {self.num_runs} runs, which went on inside a block "
            f"{self.num_resumed_inside} times; rows equal; at most {oldest:.2f} s since the last save at a "
            f"kill, longest pass {self.longest_pass_seconds:.2f} s"
        )


def loop(case: Case, *, num_kills: int, num_stops: int, seed: int = 0) -> Tally:
    """Raises AssertionError where a run came to anything else than the one that nothing ended."""
    moments, tally = random.Random(seed), Tally()
    case.make_inputs()
    replace(case, draft_tokens=0).run("whole", lambda: False)
    expected = case.rows("whole")
    passes = pq.read_table(case.directory("whole").throughput)
    assert case.reads or not case.has_own_rows or sum(passes["spared_tokens"].to_pylist()) > 0
    while tally.num_kills < num_kills or tally.num_stops < num_stops:
        name = f"ended-{tally.num_runs}"
        while not _ended(case, name, tally, moments, num_kills, num_stops):
            pass
        assert case.rows(name) == expected, f"{name} came to other rows"
        _audit(case, name, tally)
    return tally


def _ended(case: Case, name: str, tally: Tally, moments: random.Random, num_kills: int, num_stops: int) -> bool:
    """One start; True where it came to its end."""
    begin, run = time.time(), case.directory(name)
    tally.num_resumed_inside += case.admission is Admission.continuous and bool(_checkpoints(run))
    process = PROCESSES.Process(target=_start, args=(case, name))
    process.start()
    is_last = tally.num_kills >= num_kills and tally.num_stops >= num_stops
    if not is_last:
        _wait(process, run, begin, moments, most_seconds=1.6 / (1 + case.num_blocks))
    if is_last or not process.is_alive():
        process.join()
        assert process.exitcode == 0, f"ended with {process.exitcode}"
        return True
    left = [signal.SIGKILL] * (num_kills - tally.num_kills) + [signal.SIGTERM] * (num_stops - tally.num_stops)
    _end(process, moments.choice(left), run, begin, tally)
    return False


def _wait(
    process: BaseProcess, run: RunDirectory, begin: float, moments: random.Random, *, most_seconds: float
) -> None:
    """Mostly until something was saved, and then up to `most_seconds`; now and then any moment from the start on."""
    if moments.random() < 0.2:
        process.join(moments.uniform(0, 3))
        return
    while process.is_alive() and _saved_at(run, begin) == begin:
        time.sleep(0.005)
    process.join(moments.uniform(0, most_seconds))


def _end(process: BaseProcess, number: signal.Signals, run: RunDirectory, begin: float, tally: Tally) -> None:
    assert process.pid is not None
    if number is signal.SIGKILL:
        age = time.time() - max(_saved_at(run, begin), _began_at(run, begin))
        process.kill()
        process.join()
        tally.num_kills += process.exitcode == -signal.SIGKILL
        tally.ages_seconds.append(age)
        return
    process.terminate()
    process.join(120)
    too_early = -signal.SIGTERM  # before this process, which is not the job itself, could hear it
    assert process.exitcode in (0, 75, too_early), f"SIGTERM ended it with {process.exitcode}"
    tally.num_stops += process.exitcode == 75


def _saved_at(run: RunDirectory, begin: float) -> float:
    """When a checkpoint or a part of the run was last written; `begin` where that was earlier, or they go meanwhile."""
    with suppress(FileNotFoundError):
        return max([begin, *(path.stat().st_mtime for path in [*_checkpoints(run), *run.generations.glob("part-*")])])
    return begin


def _checkpoints(run: RunDirectory) -> list[Path]:
    return list(run.path.glob("running*"))


def _began_at(run: RunDirectory, begin: float) -> float:
    """When the first pass of this start could begin, or now: until then nothing can be lost."""
    try:
        written = run.schedule.stat().st_mtime
    except FileNotFoundError:
        return time.time()
    return written if written > begin else time.time()


def _audit(case: Case, name: str, tally: Tally) -> None:
    run = case.directory(name)
    parts, table = sorted(run.generations.iterdir()), pq.read_table(run.throughput)
    assert not _checkpoints(run), "a checkpoint is left"
    assert not list(run.path.rglob(".*tmp*")), "a temp is left"
    if not case.reads:
        num_tokens = sum(len(row["token_ids"]) for row in case.rows(name).values())
        assert sum(table["useful_tokens"].to_pylist()) == num_tokens, "a token counts twice"
    indices = list(zip(table["block"].to_pylist(), table["pass_index"].to_pylist(), strict=True))
    assert len(set(indices)) == len(indices), "a pass counts twice"
    tally.num_runs += 1
    for part in parts:
        tally.num_resumed_inside += int((pq.read_schema(part).metadata or {}).get(b"weightstream.num_stops", b"0"))
    tally.longest_pass_seconds = max(tally.longest_pass_seconds, *table["seconds"].to_pylist())
    allowed = case.checkpoint_seconds + tally.longest_pass_seconds + SLACK_SECONDS
    if not case.reads:
        assert max(tally.ages_seconds, default=0) <= allowed, f"{max(tally.ages_seconds):.2f} s were lost"


def _start(case: Case, name: str) -> None:
    """As the job does."""
    try:
        with StopFlag() as stop:
            case.run(name, stop)
    except Interrupted as error:
        sys.exit(error.exit_code)


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="weightstream-kill-loop-") as home:
        case = Case(
            home=Path(home),
            job=options.get("job", "generate"),
            window_rows=None if (rows := options.get("windows", "null")) == "null" else int(rows),
            family=options.get("family", "llama"),
            kv=KVTier(options.get("kv", "auto")),
            checkpoint_seconds=float(options.get("seconds", "0.3")),
            begin_alike=options.get("prompts", "bundled") == "shared",
            admission=Admission(options.get("admission", "wave")),
            draft_tokens=None if (drafts := options.get("drafts", "null")) == "null" else int(drafts),
            temperature=float(options.get("temperature", "0")),
        )
        kills, stops, seed = (
            int(options.get(key, default)) for key, default in (("kills", 40), ("stops", 20), ("seed", 0))
        )
        what = f"{case.job} windows={case.window_rows} {case.family}"
        title = f"{what} kv={case.kv.value} admission={case.admission.value}"
        title += f" drafts={case.draft_tokens} temperature={case.temperature:g}"
        print(f"{title}: {loop(case, num_kills=kills, num_stops=stops, seed=seed)}")


if __name__ == "__main__":
    main()
