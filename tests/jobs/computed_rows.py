"""A job that notes whose rows its passes compute, before it computes them: python -m tests.jobs.computed_rows FILE
jobs.evaluate WORDS is `python -m jobs.evaluate WORDS` in all else.

Each pass is a line of FILE, in one write, so that SIGKILL leaves whole lines.
"""

import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.run.block_loop import OpenBlocks
from runtime.engine.player import Player


def note(path: Path) -> None:
    """Makes every pass of this process write the directory of its run and the ids of its rows to the end of `path`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    begin, play = OpenBlocks.__post_init__, Player.play
    place = ""

    def begun(self: OpenBlocks) -> None:
        nonlocal place
        place = self.store.directory.path.name
        begin(self)

    def played(self: Player, schedule: Any, walk: Any, lanes: Any, new_tokens: Any = None) -> None:
        ids = {sequence.request.id for lane in lanes for sequence in lane.sequences}
        ids.discard("")  # what several prompts begin with, computed once, is no row
        os.write(descriptor, f"{json.dumps([place, sorted(ids)])}\n".encode())
        play(self, schedule, walk, lanes, new_tokens)

    OpenBlocks.__post_init__, Player.play = begun, played


def noted(path: Path) -> Iterator[tuple[str, frozenset[str]]]:
    """The name of the run's directory and the rows of each pass that was begun."""
    for line in path.read_text().splitlines() if path.exists() else ():
        place, ids = json.loads(line)
        yield place, frozenset(ids)


if __name__ == "__main__":
    note(Path(sys.argv[1]))
    del sys.argv[:2]  # what is left is the job's own command line
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
