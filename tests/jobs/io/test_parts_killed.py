"""Killed at any step of a commit, the run ends with the same bytes."""

import subprocess
import sys
from pathlib import Path

from tests.jobs.io.part_support import (
    ROOT,
)

# --- kill -9

KILLER = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.jobs.io import part_support as case
from jobs.io import files
from jobs.io.parts import is_finished

STEPS = ("fsync", "link", "unlink", "replace", "rename", "mkdir")
os.fsync = lambda descriptor: None  # a step like any other, but slow, and a kill loses nothing that was written

def die_at(number, before):
    count = 0
    def wrap(real):
        def step(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == number and before:
                os.kill(os.getpid(), signal.SIGKILL)
            mine = count == number
            try:
                return real(*arguments, **keywords)
            finally:
                if mine:
                    os.kill(os.getpid(), signal.SIGKILL)
        return step
    for name in STEPS:
        setattr(os, name, wrap(getattr(os, name)))

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

def work(store):
    for block in sorted(set(store.blocks) - set(store.committed())):
        store.commit(block, case.rows_of(block), case.PASSES)
    store.finish()

def visible(store):
    return sorted(n for n in os.listdir(store.directory.generations) if not n.startswith("."))

def audit(store, reference):
    whole = case.parts(reference)
    for name in visible(store):
        data = (store.directory.generations / name).read_bytes()
        assert data == whole[name] or data == b"corrupt", name
    assert not store.directory.success.exists() or is_finished(store.directory), "success over missing parts"

base = Path(sys.argv[1])
reference = case.committed_store(base / "reference")
reference.finish()
kills = 0
for before in (True, False):
    number, code = 0, None
    while code != 0:
        number += 1
        store = case.store_at(base / f"{{before}}{{number}}")
        store.commit(0, case.rows_of(0), case.PASSES)
        store.directory.generations_part(0).write_bytes(b"corrupt")
        code = child(lambda: (die_at(number, before), work(store)))
        assert code in (0, -signal.SIGKILL), code
        kills += code != 0
        audit(store, reference)
        assert child(lambda: (die_at(number + 1, before), work(store))) in (0, -signal.SIGKILL)  # killed while resuming
        audit(store, reference)
        work(store)
        assert case.parts(store) == case.parts(reference)
        assert is_finished(store.directory)
        assert [p.read_bytes() for p in case.quarantined(store)] == [b"corrupt"]
        left = [p.name for p in store.directory.path.rglob(".*")]
        assert left == [], left
print(kills)
"""


def test_kill_at_every_commit_step_and_again_while_resuming_gives_the_same_bytes(tmp_path: Path) -> None:
    script = KILLER.format(tests=str(ROOT))
    command = [sys.executable, "-c", script, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 60


def test_a_file_size_limit_of_the_kernel_commits_nothing(tmp_path: Path) -> None:
    script = f"""if True:
        import resource, sys
        from pathlib import Path
        sys.path.insert(0, {str(ROOT)!r})
        from tests.jobs.io import part_support as case
        from runtime.errors import OutputError
        store = case.store_at(Path({str(tmp_path)!r}))
        store.commit(0, case.rows_of(0), case.PASSES)
        before = case.parts(store)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            store.commit(1, case.rows_of(1), case.PASSES)
        except OutputError as error:
            assert "EFBIG" in str(error), error
        else:
            raise SystemExit("committed more than the limit allows")
        assert case.parts(store) == before
    """
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# --- the plan
