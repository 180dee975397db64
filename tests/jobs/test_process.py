import gc
import importlib
import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from jobs.config.process import gc_paused, tuned_environment
from runtime.stream.host_memory import HEAP_TUNABLE


def test_what_the_user_has_set_stays() -> None:
    found = tuned_environment(
        {"HOME": "/root", "GLIBC_TUNABLES": "glibc.malloc.perturb=1", "OMP_WAIT_POLICY": "active"}
    )
    assert found == {
        "HOME": "/root",
        "GLIBC_TUNABLES": f"glibc.malloc.perturb=1:{HEAP_TUNABLE}",
        "OMP_WAIT_POLICY": "active",
    }


def test_openmp_waits_passively_where_nothing_is_said() -> None:
    assert tuned_environment({}) == {"GLIBC_TUNABLES": HEAP_TUNABLE, "GOMP_SPINCOUNT": "1000"}


def test_what_is_settled_is_not_settled_again() -> None:
    once = tuned_environment({"HOME": "/root"})
    assert tuned_environment(once) == once


def test_garbage_is_collected_behind_the_imports_if_it_was_before() -> None:
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_garbage_is_collected_behind_imports_that_fail() -> None:
    with pytest.raises(ModuleNotFoundError), gc_paused():
        importlib.import_module("jobs.none_such")
    assert gc.isenabled()


ROOT = Path(__file__).resolve().parents[2]
LOOK = """
import json, os, sys
from jobs.config.process import prepare_process
prepare_process()
print("to nobody, or an escape: \u65e5")
print("to nobody", file=sys.stderr)
with open(sys.argv[1], "w") as file:
    links = [os.readlink(f"/proc/self/fd/{n}") for n in range(3)]
    inherited = [os.get_inheritable(n) for n in range(3)]
    json.dump({"file": file.fileno(), "links": links, "inherited": inherited, "read": sys.stdin.read()}, file)
"""


@pytest.mark.parametrize("closed", [each for count in range(1, 4) for each in combinations((0, 1, 2), count)])
def test_closed_standard_streams_lead_nowhere_and_no_file_takes_their_place(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    closing = " ".join(f"{number}>&-" for number in closed)
    command = f'exec "$0" -c "$1" "$2" {closing}'
    words = ["sh", "-c", command, sys.executable, LOOK, str(out)]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, cwd=ROOT, env=env, input=b"", capture_output=True, timeout=60)
    found = json.loads(out.read_text())
    assert found["file"] > 2
    assert [found["links"][number] for number in closed] == ["/dev/null"] * len(closed)
    assert (found["inherited"], found["read"]) == ([True] * 3, "")
    assert done.stdout == (b"" if 1 in closed else b"to nobody, or an escape: \\u65e5\n")
    assert done.stderr == (b"" if 2 in closed else b"to nobody\n")


def test_a_path_beyond_ascii_is_read_in_the_c_locale(tmp_path: Path) -> None:
    path = tmp_path / "größe.txt"
    path.write_text("ü", encoding="utf-8")
    start = "import sys; from jobs.config.process import prepare_process; prepare_process(); "
    program = start + "print(open(sys.argv[1]).read() == 'ü')"
    env = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    words = [sys.executable, "-c", program.replace("ü", "\\xfc"), str(path)]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")
