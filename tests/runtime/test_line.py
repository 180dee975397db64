"""Ranks in a line leave nothing behind that aborts a process as it ends."""

import subprocess
import sys
from pathlib import Path

# Each transfer that was waited for is the last one of its waiter, as of a line at the end of a run.
PROGRAM = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from runtime.ranks.collectives import TransferWaiter
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
waiters = [TransferWaiter() for _ in range(300)]
for waiter in waiters:
    waiter.begin(dist.all_reduce(torch.ones(1), async_op=True))
    while not waiter.is_done(timedelta(seconds=1)):
        pass
dist.destroy_process_group()
"""


def test_a_process_whose_transfers_have_ended_is_not_aborted_as_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "meet")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
