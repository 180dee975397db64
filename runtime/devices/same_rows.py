"""What sessions have in common whose ranks all play the same passes of the same rows. It stands alone as two ways of
dividing a model are made of it.
"""

from collections.abc import Generator, Mapping, Sequence

from ..batching.balance import Block
from ..engine.records import PassCounts
from ..engine.sequence import Completion, Request, Unfinished
from ..session import OnPass, Session
from .agreement import Agreement
from .messages import Finished
from .sharded_session import RankSession


class BetweenPasses(Agreement):
    """What such ranks agree on before each pass. Within one they go on, as each waits for others."""

    def should_stop(self) -> bool:
        return False


class SameRowsSession(RankSession):
    """`RankSession`, where each rank has all rows. Records have the times and bytes of this rank."""

    def _part(
        self,
        block: Block,
        left: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, Unfinished],
        on_pass: OnPass,
    ) -> Generator[tuple[int, Completion]]:
        self._requests = requests
        return Session.wave(self, block, left, requests, unfinished, on_pass)

    def _ended(self, counts: PassCounts | None) -> tuple[PassCounts, Finished]:
        return counts or PassCounts.total([]), self._take_finished()
