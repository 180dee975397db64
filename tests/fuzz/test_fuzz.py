"""Two seconds of each target find nothing; the watch finds what it is there for."""

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from runtime.errors import CheckpointError
from tests.fuzz import child, targets, watch
from tests.fuzz.mutate import mutated, mutated_json
from tests.fuzz.target import Cases, OutsideError, Target

# Cases of each target, of a second or less together, and a third of them in `make test`; `python -m tests.fuzz` goes on
# for as long as it is asked to.
USUAL_CASES = 200
FEWER_CASES = {"quantised": 100, "tokenizer": 60, "config": 30, "packed": 20, "grammar": 20, "run": 5, "template": 2}


@pytest.mark.parametrize("name", targets.BY_NAME)
def test_files_of_a_stranger_are_accepted_or_refused(name: str, pytestconfig: pytest.Config) -> None:
    num_cases = FEWER_CASES.get(name, USUAL_CASES)
    if not pytestconfig.getoption("--whole"):
        num_cases = -(-num_cases // 3)
    tally = watch.watch(name, seconds=600.0, seed=0, last=num_cases - 1)
    assert not tally.findings, "\n\n".join(map(str, tally.findings))
    assert tally.counts["accepted"] + tally.counts["refused"] == num_cases


def fail(error: type[BaseException]):
    def check(directory: Path, rng: random.Random) -> None:
        raise error("why")

    return check


OUTCOMES = [(OutsideError, "outside"), (CheckpointError, "refused"), (KeyError, "raised"), (BaseException, "raised")]


@pytest.mark.parametrize(("error", "outcome"), OUTCOMES)
def test_only_our_own_errors_are_refusals(
    error: type[BaseException], outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, object]] = []
    monkeypatch.setattr(child, "say", lambda **what: said.append(what))
    target = Target(name="x", seeds=lambda home: [{"a": b"1"}], corpus=lambda home: [], check=fail(error))
    child.run(Cases.of(target, tmp_path), 0, 0, tmp_path / "case")
    assert said[-1]["outcome"] == outcome


def hang() -> None:
    time.sleep(60)


def spin() -> None:
    while True:
        pass


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def do_nothing() -> None: ...


def fake(
    then: Callable[[], None],
    grown: int,
    report: Connection,
    home: Path,
    name: str,
    seed: int,
    first: int,
    seconds: float,
    last: int | None,
) -> None:
    """A child whose one case does `then`."""
    report.send({"ready": True})
    report.send({"begins": first, "cpu_seconds": sum(os.times()[:4])})
    then()
    report.send({"ends": first, "outcome": "accepted", "text": "", "grown": grown})
    report.send({"done": True})


@pytest.mark.parametrize(
    ("then", "grown", "what"),
    [
        (hang, 0, "no end after"),
        (spin, 0, "no end after"),
        (die, 0, "ended the process with -9"),
        (do_nothing, 2**31, "grew by 2.0 GiB"),
        (do_nothing, 0, None),
    ],
)
def test_a_hang_a_death_and_growth_are_findings_and_the_next_case_goes_on(
    then: Callable[[], None], grown: int, what: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "CHILD", partial(fake, then, grown))
    monkeypatch.setattr(watch, "MAX_SECONDS", 0.5)
    tally = watch.watch("x", seconds=30, seed=0, first=4, last=5)
    assert [finding.number for finding in tally.findings] == ([4, 5] if what else [])
    assert all(what is not None and what in finding.what for finding in tally.findings)
    assert "seed=0 case=4" in str(tally.findings[0]) if what else tally.counts["accepted"] == 2


def test_a_case_is_the_same_whenever_it_is_made(tmp_path: Path) -> None:
    cases = Cases.of(targets.BY_NAME["safetensors"], tmp_path)
    assert [cases.files(3, n) for n in range(200)] == [cases.files(3, n) for n in range(200)]
    assert cases.files(3, 199) != cases.files(4, 199)


def test_mutations_change_what_they_are_given() -> None:
    rng, content = random.Random(0), b'{"a": [1, {"b": "c"}], "d": null}'
    for how in (mutated, mutated_json):
        made = {how(rng, content) for _ in range(200)}
        assert len(made) > 100
