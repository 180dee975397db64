"""Continuous admission: requests enter as soon as others have finished, so all blocks that are left are open."""

from collections.abc import Sequence

from runtime.batching.balance import Block

from .open_run import OpenRun, StreamingSession, Surroundings
from .progress import Progress


def generate_continuously(session: StreamingSession, blocks: Sequence[Block], around: Surroundings) -> None:
    """Generates and commits `blocks`. Raises Interrupted or OutputError."""
    recorded = frozenset(row.pass_index for row in around.store.passes())
    run = OpenRun(session, blocks, around, recorded=recorded)
    with Progress(run.num_tokens, len(run)) as progress:
        run.finish(progress)
