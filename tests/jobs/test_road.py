"""The road of a run is short: few functions of ours stand between a job's `main` and the first pass."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_FRAMES = 8  # from `main` to `Session.wave`, both included
PROGRAM = """
import json, os, runpy, sys
from runtime.engine.session import Session
ROOMS = tuple(f"{sys.argv[1]}/{name}/" for name in ("jobs", "runtime"))
def wave(*given, **named):
    frame, found = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(ROOMS):
            found.append(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    print(json.dumps(found), flush=True)
    os._exit(0)
Session.wave = wave
sys.argv[:] = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["jobs.generate", "dataset.limit=1", "sampling.max_new_tokens=2"], id="generate"),
        pytest.param(
            ["jobs.score", "dataset.limit=1", "dataset.path={rows}", "dataset.kind=jsonl"],
            id="score",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_few_frames_stand_between_main_and_a_wave(words: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Reverse: abc", "target": " cba"}) + "\n")
    job, *settings = (word.format(rows=rows) for word in words)
    command = [sys.executable, "-c", PROGRAM, str(ROOT), job, f"output_root={tmp_path}", *settings]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    frames = json.loads(ended.stdout.splitlines()[-1])
    assert frames, ended.stdout
    names = [*(frame.rpartition(":")[2] for frame in reversed(frames)), "Session.wave"]
    road = names[names.index("main") :]
    assert road[-2] == "OpenBlocks.generate"
    assert len(road) <= MOST_FRAMES, " > ".join(road)
