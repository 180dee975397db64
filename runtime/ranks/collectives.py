"""Pieces of weights that ranks send one another: where they see no memory in common, or are asked to do without.

The collectives of a session have a process group of their own, so that their order is none of the messages'. All ranks
come to each in one order, that of the schedule.
"""

import time
from threading import Event

import torch
import torch.distributed as dist

from ..closing import Closing
from ..errors import Interrupted
from .ranks import STOPPED, Ranks

POLL_SECONDS, NUM_POLLS = 1e-4, 20  # between two looks whether a piece is there; looks between two at the others


class Collectives(Closing):
    """The collectives of one session, of one thread at a time but for `abandon`."""

    def __init__(self, ranks: Ranks):
        """Made by all ranks at once. Raises PeerEnded."""
        self.ranks = ranks
        ranks.exchange({})  # all are there: nothing ends the wait for one that has ended
        self._group = ranks.new_group()
        self._is_abandoned = Event()
        self._why = Interrupted(STOPPED)  # nothing can be gathered any more

    def close(self) -> None:
        """Ends the connections. Where one is awaited that was abandoned, the others see that nothing comes any more."""
        if self._is_abandoned.is_set():
            self._group.abort()
        else:
            dist.destroy_process_group(self._group)

    def abandon(self) -> None:
        """Nobody waits any more for what has begun, and nothing else can be gathered: ranks that go on would take one
        piece for another."""
        self._is_abandoned.set()

    def gather(self, pieces: torch.Tensor) -> None:
        """Fills `pieces`, uint8, with those of all ranks, of one size and in their order; this one's is in its place.
        Raises PeerEnded or Interrupted where another never comes to it."""
        own = pieces.chunk(self.ranks.size)[self.ranks.rank]
        if self._is_abandoned.is_set():
            raise self._why
        try:
            self._await(dist.all_gather_single(pieces, own, group=self._group, async_op=True))
        except RuntimeError as error:
            self._why = Interrupted(STOPPED) if self.ranks.is_stopping else self.ranks.ending(error)
            self.abandon()
            raise self._why from error
        except Interrupted as error:
            self._why = error
            self.abandon()
            raise

    def _await(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank is of the group"
        num_looks = 0
        while not work.is_completed():
            if self._is_abandoned.is_set():
                raise Interrupted(STOPPED)
            num_looks += 1
            if num_looks % NUM_POLLS == 0:
                self.ranks.require_going()
            time.sleep(POLL_SECONDS)
        work.wait()
