"""What sessions have in common whose ranks all play the same passes of the same rows. It stands alone as two ways of
dividing a model are made of it.
"""

from collections.abc import Sequence

from ..batching.balance import Block
from ..engine.records import PassCounts
from ..engine.session import Seats, Session
from ..sequences.sequence import Request
from ..sequences.sequence import Sequence as Running
from .agreement import KIND, Agreement
from .messages import Finished
from .sharded_session import RankSession

LEAST = "least"


class BetweenPasses(Agreement):
    """What such ranks agree on before each pass. Within one they go on, as each waits for others."""

    def should_stop(self) -> bool:
        return False

    def lose_pass(self) -> None:
        """Others wait within the pass and can be told nothing, but see the end of this rank."""
        self._has_stopped = True

    def least(self, counts: Sequence[int | None]) -> list[int | None]:
        """What all ranks have of each of these, given what this one has; None: as the policy says."""
        met = [each[LEAST] for each in self.ranks.exchange({KIND: LEAST, LEAST: counts})]
        return [min(each) if None not in each else None for each in zip(*met, strict=True)]


class SameRowsSession(RankSession):
    """`RankSession`, where each rank has all rows, and none takes more memory for them than every rank has: so, as all
    know the same tokens, they admit the same rows. Records have the times and bytes of this rank."""

    @property
    def _between(self) -> BetweenPasses:
        assert isinstance(self._agreement, BetweenPasses), "ranks have the same rows"
        return self._agreement

    def _own(self, block: Block, left: Sequence[int]) -> tuple[Block, Sequence[int]]:
        return block, left

    def _own_line(self, order: Sequence[int]) -> Sequence[int]:
        return order

    def _chunks(
        self, block: Block, requests: Sequence[Request], lanes: Sequence[Sequence[Running]]
    ) -> Sequence[int | None]:
        return self._between.least(super()._chunks(block, requests, lanes))

    def _seats(self) -> Seats:
        num_pages = self._plan.placement.kv.num_pages
        [least] = self._between.least([num_pages])
        return Session._seats(self)._replace(others_pages=num_pages - (least or 0))

    def _ended(self, counts: PassCounts | None) -> tuple[PassCounts, Finished]:
        return counts or PassCounts.total([]), self._take_finished()
