"""Ten seconds of each target find nothing; the watch finds what it is there for."""

import random
from pathlib import Path

import pytest

from runtime.errors import CheckpointError
from tests.fuzz import child, targets, watch
from tests.fuzz.mutate import mutated, mutated_json
from tests.fuzz.target import Cases, OutsideError, Target

SECONDS = 10.0


@pytest.mark.parametrize("name", targets.BY_NAME)
def test_files_of_a_stranger_are_accepted_or_refused(name: str) -> None:
    tally = watch.watch(name, seconds=SECONDS, seed=0)
    assert not tally.findings, "\n\n".join(map(str, tally.findings))
    assert tally.counts["accepted"] + tally.counts["refused"] > 0


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


SCRIPT = """
import os, sys, time
print('{"ready": true}', flush=True)
first = int(next(word for word in sys.argv if word.startswith("first=")).partition("=")[2])
print('{"begins": %d}' % first, flush=True)
{then}
print('{"ends": %d, "outcome": "accepted", "text": "", "grown": {grown}}' % first, flush=True)
print('{"done": true}', flush=True)
"""


@pytest.mark.parametrize(
    ("then", "grown", "what"),
    [
        ("time.sleep(60)", 0, "no end after"),
        ("while True: pass", 0, "no end after"),
        ("os.kill(os.getpid(), 9)", 0, "ended the process with -9"),
        ("", 2**31, "grew by 2.0 GiB"),
        ("", 0, None),
    ],
)
def test_a_hang_a_death_and_growth_are_findings_and_the_next_case_goes_on(
    then: str, grown: int, what: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "fake.py"
    script.write_text(SCRIPT.replace("{then}", then).replace("{grown}", str(grown)))
    monkeypatch.setattr(watch, "CHILD", [str(script)])
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
