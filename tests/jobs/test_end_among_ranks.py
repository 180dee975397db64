"""A rank whose peers are gone ends with its own code, whatever threads of gloo still wait."""

import subprocess
import sys
from pathlib import Path

import pytest

BODY = """
import atexit, sys
from jobs.config.process import exit_as_rank
if {joins}:
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method="file://{meet}", rank=0, world_size=1)
atexit.register(print, "the interpreter's own end")
print("said before")
exit_as_rank(75)
sys.exit(75)
"""


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("joins", [True, False])
def test_a_rank_that_has_not_left_the_others_ends_at_once_with_its_code(joins: bool, tmp_path: Path) -> None:
    body = BODY.format(joins=joins, meet=tmp_path / "meet")
    ended = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 75
    assert ended.stdout.startswith("said before")
    assert ("the interpreter's own end" in ended.stdout) is not joins
