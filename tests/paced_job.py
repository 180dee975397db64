"""A job that waits before each pass, for tests that need it to last: python -m tests.paced_job -m jobs.generate ...

A processor that it would keep busy meanwhile is one that other tests lack.
"""

import runpy
import sys
import time
from typing import Any

from runtime.engine.player import Player

WAIT_SECONDS = 0.1


def pace() -> None:
    play = Player.play

    def played(self: Player, schedule: Any, walk: Any, lanes: Any, new_tokens: Any = None) -> None:
        time.sleep(WAIT_SECONDS)
        play(self, schedule, walk, lanes, new_tokens)

    Player.play = played


if __name__ == "__main__":
    pace()
    del sys.argv[: sys.argv.index("-m") + 1]  # what is left is the job's own command line
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
