"""Workers that one command starts on this machine: each has its share, and they end with the rows of one."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from jobs.config.settings import GenerateConfig, Workers
from jobs.config.signals import StopFlag
from jobs.record.run_dir import RunDirectory
from jobs.run.tasks.generate import generate
from jobs.workers.local import (
    WORKER_VARIABLE,
    WorkersResult,
    machine_shares,
    processors_by_node,
    run_workers,
    should_start_workers,
    split_processors,
)
from runtime.config.settings import MachineConfig, OffloadConfig
from runtime.errors import ConfigError
from tests.generations import read_generations
from tests.jobs.worker_loop import Case

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def elastic(num_workers: int | None, **changes: object) -> GenerateConfig:
    return GenerateConfig(workers=Workers.elastic, num_workers=num_workers, **changes)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Two nodes of two cores each, with two threads a core: 0 and 4, 1 and 5, ..."""
    for node, numbers in enumerate(("0-1,4-5", "2-3,6-7")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(f"{numbers}\n")
    for number in range(8):
        folder = tmp_path / f"cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    return tmp_path


def test_processors_are_parted_by_nodes_then_by_cores(system: Path) -> None:
    nodes = processors_by_node(system, range(8))
    assert nodes == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert split_processors(nodes, 2) == nodes
    assert split_processors(nodes, 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert split_processors(nodes, 3) == [[0, 4], [1, 5, 2], [6, 3, 7]]
    assert processors_by_node(system, [5, 1]) == [[1, 5]], "those that the process may use"
    assert split_processors([[3]], 2) == [[3], [3]]
    assert processors_by_node(system / "gone", [2, 1]) == [[1, 2]]


def test_workers_have_equal_shares_of_memory_and_threads_and_a_device_each() -> None:
    config = elastic(2, offload=OffloadConfig(host_memory_gib=5.0), machine=MachineConfig(num_threads=5))
    given = machine_shares(config, CPU, [[0, 1, 2, 3]], 0)
    assert [share.processors for share in given] == [[0, 1], [2, 3]]
    assert {*given[0].settings} == {"offload.host_memory_gib=2.500000", "machine.num_threads=2"}
    assert len(machine_shares(elastic(None), CPU, [[0], [1], [2]], 0)) == 3, "one for each node"
    shares = machine_shares(elastic(2, metrics_file="to/run.prom"), CPU, [[0]], 0)
    assert [share.settings[-1] for share in shares] == [f"metrics_file=to/run-{number}.prom" for number in (0, 1)]
    devices = [share.settings[1] for share in machine_shares(elastic(None), torch.device("cuda"), [[0, 1]], 2)]
    assert devices == ["machine.device=cuda:0", "machine.device=cuda:1"]
    with pytest.raises(ConfigError, match="num_workers=3: torch finds 2 cuda devices"):
        machine_shares(elastic(3), torch.device("cuda"), [[0]], 2)


def test_only_a_command_that_is_no_worker_itself_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not should_start_workers(GenerateConfig(), [])
    assert should_start_workers(elastic(2), [])
    with pytest.raises(ConfigError, match="--multirun"):
        should_start_workers(elastic(2), ["--multirun"])
    monkeypatch.setenv(WORKER_VARIABLE, "3 2 1")
    assert not should_start_workers(elastic(2), [])
    for count, named in ((0, "num_workers must be 1"), (5000, "num_workers must be 1")):
        with pytest.raises(ConfigError, match=named):
            elastic(count)
    with pytest.raises(ConfigError, match=r"num_workers=.* needs workers=elastic"):
        GenerateConfig(num_workers=2)


class FakeStop(StopFlag):
    """Asked to stop by this signal once two workers are ready, if by any."""

    def __init__(self, name: str, ready: Path):
        self._name, self._ready = name, ready

    @property
    def requested(self) -> bool:
        return bool(self._name) and len(list(self._ready.iterdir())) == 2


def run_two(first: str, other: str, stop: str = "", ready: Path = ROOT) -> WorkersResult:
    """What two workers come to, of which the first does this in bash and the second that."""
    script = f'if [[ "$*" == *log_level=warning* ]]; then {other}; else {first}; fi'
    return run_workers(elastic(2), ["bash", "-c", script, "worker"], FakeStop(stop, ready))


SAYS = "echo rows ok 12"
FAILS = "echo log >&2; echo error: it is full >&2; exit 75"


@pytest.mark.parametrize(
    ("first", "other", "code", "output", "error"),
    [
        ("exit 0", SAYS, 0, "", ""),
        ("exit 3", f"{SAYS}; exit 3", 3, "", ""),
        ("kill -9 $$", SAYS, 0, "rows ok 12", ""),
        ("exit 75", f"{SAYS}; exit 0", 0, "rows ok 12", ""),
        ("exit 75", "exit 75", 75, "", ""),
        ("exit 2", "echo error: refused >&2; exit 2", 2, "", ""),
        ("kill -9 $$", FAILS, 75, "", "error: it is full"),
        ("exit 75", "echo error: damaged >&2; exit 4", 4, "", "error: damaged"),
    ],
)
def test_workers_end_with_one_code_and_one_message(first: str, other: str, code: int, output: str, error: str) -> None:
    assert run_two(first, other) == (code, output, error)


def test_where_all_are_killed_it_is_said_and_the_command_goes_on() -> None:
    code, output, error = run_two("kill -9 $$", "kill -9 $$")
    assert (code, output) == (75, "")
    assert re.fullmatch(r"interrupted: worker 0 \(pid \d+\) was killed by SIGKILL; start the same.*", error)


@pytest.mark.parametrize(("name", "other"), [("SIGTERM", "SIGUSR1"), ("SIGUSR1", "SIGTERM")])
def test_a_signal_to_stop_is_passed_on_to_all_as_it_came(name: str, other: str, tmp_path: Path) -> None:
    waits = (
        f"trap 'exit 75' {name}; trap 'exit 4' {other}; touch {tmp_path}/$$; for i in {{1..600}}; do sleep 0.05; done"
    )
    assert run_two(waits, waits, name, tmp_path) == (75, "", "")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow("jobs/test_elastic_workers.py::test_workers_that_are_killed_stopped_and_paused_make_the_rows_of_one")
def test_workers_of_one_command_go_on_without_one_that_is_killed_and_make_the_rows_of_one(tmp_path: Path) -> None:
    case, pipe = Case(home=tmp_path, num_rows=12), subprocess.PIPE
    generate(case.config("alone", Workers.one), lambda: False)
    command = [sys.executable, "-m", "jobs.generate", *case.words(), "num_workers=2", "offload=cpu"]
    leader = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=pipe, stderr=pipe, text=True
    )
    parts, deadline = tmp_path / "generate" / "shared" / "generations", time.monotonic() + 120
    while not list(parts.glob("part-*.parquet")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(children(leader.pid)[0], signal.SIGKILL)
    output, errors = leader.communicate(timeout=120)
    assert leader.returncode == 0, errors
    assert "was killed by SIGKILL: the other workers take over its blocks" in errors
    assert "rows ok" in output
    shared, alone = (read_generations(RunDirectory(path=tmp_path / "generate" / name)) for name in ("shared", "alone"))
    assert shared.equals(alone)
