"""Killed at any step of a continuous run, its checkpoints among them, the run ends with the same bytes."""

import subprocess
import sys
from pathlib import Path

from tests.jobs.io.part_support import ROOT

KILLER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from jobs.io.parts import is_finished
from tests.jobs.io import part_support, streaming_support as case

NUM_ROWS = 6  # two blocks
STEPS = ("fsync", "link", "unlink", "replace", "rename", "mkdir")
os.fsync = lambda descriptor: None  # a step like any other, but slow, and a kill loses nothing that was written

def die_at(number):
    "Before the numbered step of the file system, or pass of the session."
    count = 0
    def wrap(real):
        def step(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **keywords)
        return step
    for name in STEPS:
        setattr(os, name, wrap(getattr(os, name)))
    case.FakeSession._pass = wrap(case.FakeSession._pass)

def child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def work(path, session=None):
    return case.run_at(path, session or case.FakeSession(), asked=case.made(NUM_ROWS))

def audit(store, whole):
    for name, data in part_support.parts(store).items():
        assert name.startswith(".") or data == whole[name], name
    assert not store.directory.success.exists() or is_finished(store.directory), "success over missing parts"

base = Path(sys.argv[1])
reference = work(base / "reference")
whole, num_tokens = part_support.parts(reference), sum(row.issued_tokens for row in reference.passes())
number, code = 0, None
while code != 0:
    number += 1
    path = base / str(number)
    store = case.store_at(path, case.made(NUM_ROWS))
    code = child(lambda: (die_at(number), work(path)))
    assert code in (0, -signal.SIGKILL), code
    audit(store, whole)
    assert child(lambda: (die_at(number // 2 + 3), work(path))) in (0, -signal.SIGKILL)  # while resuming
    audit(store, whole)
    last = case.FakeSession()
    work(path, last)
    assert part_support.parts(store) == whole
    assert is_finished(store.directory)
    indices = [row.pass_index for row in store.passes()]
    assert len(indices) == len(set(indices)), "a pass is in two parts"
    assert part_support.quarantined(store) == []
    left = [p.name for p in path.rglob(".*")] + [p.name for p in path.glob("running*")]
    assert left == [], left
    assert number < 60 or last.num_drawn < num_tokens, "all was generated again"
print(number - 1)
"""


def test_kill_at_every_step_and_again_while_resuming_gives_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLER.format(root=str(ROOT)), str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 80
