"""What ranks agree on that compute each token together: all play the same passes of the same rows, of which each has a
part of every layer and some of the heads. So all come to the same tokens, and rank 0 alone need tell of them.
"""

import zlib

from ..engine.records import Phase
from ..errors import ConfigError, Interrupted
from ..ranks.ranks import STOPPED
from ..sequences.sequence import Unfinished
from .agreement import KIND, LANES, STOPPING
from .same_rows import BetweenPasses


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
