"""Sessions whose ranks all play the same passes of the same rows: what two ways of dividing a model have in common, and
what ranks agree on that compute each token together, of which each has a part of every layer and some of the heads.
Those come to the same tokens, so rank 0 alone need tell of them.
"""

import zlib
from collections.abc import Sequence

from ..batching.balance import Block
from ..engine.records import PassCounts, Phase
from ..engine.session import Seats, Session
from ..errors import ConfigError, Interrupted
from ..ranks.ranks import STOPPED
from ..sequences.sequence import Request, Unfinished
from ..sequences.sequence import Sequence as Running
from .agreement import KIND, LANES, STOPPING, Agreement
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


class PassAgreement(BetweenPasses):
    """That the next pass is the same one, and that none of them is to stop."""

    def lanes(self, num_lanes: int, phase: Phase) -> tuple[int, Phase]:
        """What was asked for. Raises Interrupted where a rank was asked to stop, PeerEnded where one has ended, and
        ConfigError where one has drawn other tokens."""
        own = {KIND: LANES, "lanes": num_lanes, "phase": phase.value, "drawn": self._drawn()}
        met = self.ranks.exchange({**own, STOPPING: self._asked_to_stop()})
        if any(each[STOPPING] for each in met):
            self._has_stopped = True
            raise Interrupted(STOPPED)
        odd = [rank for rank, each in enumerate(met) if {**each, STOPPING: False} != {**met[0], STOPPING: False}]
        if odd:
            self._has_stopped = True
            raise ConfigError(
                f"devices=tensor: rank {odd[0]} has come to other tokens than rank 0: all ranks need processors of "
                "one kind, and as many threads"
            )
        return num_lanes, phase

    def stop(self) -> None:
        """Has the others stop before their next pass, unless all are about to."""
        if not self._has_stopped:
            self._has_stopped = True
            self.ranks.exchange({KIND: LANES, STOPPING: True})

    def all_states(self) -> dict[int, Unfinished]:
        """What this rank's rows have come to, as all others' have."""
        return dict(self.states())

    def _drawn(self) -> int:
        """A sum over the tokens of rows that go on."""
        last = [(i, len(each.generated), each.generated[-1]) for i, each in self.rows().items() if each.generated]
        return zlib.crc32(repr(last).encode())
