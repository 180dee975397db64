"""The road of a run is short: few functions of ours stand between a job's `main` and the first pass."""

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from jobs.config.cli import run_job
from jobs.config.settings import GenerateConfig, ScoreConfig
from runtime.engine.session import Session
from tests.processes import PROCESSES

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {"generate": GenerateConfig, "score": ScoreConfig}
MOST_FRAMES = 8  # from `main` to `Session.wave`, both included


def stand_before_a_wave(job: str, settings: Sequence[str], found: Path) -> None:
    """Writes to `found` which functions of ours a job is in as it begins its first wave, the last first, and ends."""
    rooms = tuple(f"{ROOT}/{name}/" for name in ("jobs", "runtime"))

    def wave(*given: object, **named: object) -> None:
        frame, names = sys._getframe(1), list[str]()
        while frame is not None:
            if frame.f_code.co_filename.startswith(rooms):
                names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        found.write_text(json.dumps(names))
        os._exit(0)

    Session.wave = wave
    sys.argv = [job, *settings]
    run_job(import_module(f"jobs.{job}").main, CONFIGS[job])


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["generate", "dataset.limit=1", "sampling.max_new_tokens=2"], id="generate"),
        pytest.param(
            ["score", "dataset.limit=1", "dataset.path={rows}", "dataset.kind=jsonl"],
            id="score",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_few_frames_stand_between_main_and_a_wave(words: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Reverse: abc", "target": " cba"}) + "\n")
    job, *settings = (word.format(rows=rows) for word in words)
    found = tmp_path / "found.json"
    process = PROCESSES.Process(target=stand_before_a_wave, args=(job, [f"output_root={tmp_path}", *settings], found))
    process.start()
    process.join()
    assert process.exitcode == 0
    names = [*reversed(json.loads(found.read_text())), "Session.wave"]
    road = names[names.index("main") :]
    assert road[-2] == "OpenBlocks.generate"
    assert len(road) <= MOST_FRAMES, " > ".join(road)
