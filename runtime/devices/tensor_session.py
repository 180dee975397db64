"""A session of ranks that compute each token together: all play the same passes of the same rows, of which each has a
part of every layer and some of the heads. So all come to the same tokens, and rank 0 alone need tell of them.
"""

import zlib
from collections.abc import Callable, Sequence

from ..batching.balance import Block
from ..engine.records import Phase
from ..engine.sequence import Request, Unfinished
from ..engine.sequence import Sequence as Running
from ..errors import ConfigError, Interrupted
from ..ranks.ranks import Ranks
from ..session import Session
from .agreement import KIND, LANES, STOPPED, STOPPING
from .same_rows import BetweenPasses, SameRowsSession


class PassAgreement(BetweenPasses):
    """That the next pass is the same one, and that none of them is to stop."""

    def __init__(self, ranks: Ranks, asked_to_stop: Callable[[], bool]):
        super().__init__(ranks, asked_to_stop)
        self.drawn: Callable[[], int] = int  # a sum over what this rank has drawn so far

    def lanes(self, num_lanes: int, phase: Phase) -> tuple[int, Phase]:
        """What was asked for. Raises Interrupted where a rank was asked to stop, PeerEnded where one has ended, and
        ConfigError where one has drawn other tokens."""
        own = {KIND: LANES, "lanes": num_lanes, "phase": phase.value, "drawn": self.drawn()}
        met = self.ranks.exchange({**own, STOPPING: self._asked_to_stop()})
        if any(each[STOPPING] for each in met):
            self._has_stopped = True
            raise Interrupted(STOPPED)
        odd = [rank for rank, each in enumerate(met) if {**each, STOPPING: False} != {**met[0], STOPPING: False}]
        if odd:
            self._has_stopped = True
            raise ConfigError(
                f"devices.way=tensor: rank {odd[0]} has come to other tokens than rank 0: all ranks need processors of "
                "one kind, and as many threads"
            )
        return num_lanes, phase

    def stop(self) -> None:
        """Has the others stop before their next pass, unless all are about to."""
        if not self._has_stopped:
            self._has_stopped = True
            self.ranks.exchange({KIND: LANES, STOPPING: True})


class TensorSession(SameRowsSession):
    def snapshot(self) -> dict[int, Unfinished]:
        return Session.snapshot(self)

    def drawn(self) -> int:
        """A sum over the tokens of sequences that go on."""
        last = [(place, len(each.generated), *each.generated[-1:]) for place, each in self._open.items()]
        return zlib.crc32(repr(last).encode())

    def _chunks(
        self, block: Block, requests: Sequence[Request], lanes: Sequence[Sequence[Running]]
    ) -> Sequence[int | None]:
        """Rank 0's, as memory that is left over is of each rank's own."""
        return self._ranks.exchange({"chunks": super()._chunks(block, requests, lanes)})[0]["chunks"]
