"""What ranks agree on that divide the layers of a model: all play the same passes of the same rows, the last one draws
the tokens, and all are told them. So all come to the same, and rank 0 alone need write it.
"""

from collections.abc import Callable

from ..engine.records import Phase
from ..errors import Interrupted
from ..ranks.line import Line
from ..ranks.ranks import STOPPED, Message
from ..sequences.sequence import Unfinished
from .agreement import KIND, LANES, STATES, STOPPING
from .messages import read_states
from .same_rows import BetweenPasses


class PipelineAgreement(BetweenPasses):
    """Whether one of them is to stop. How far rows have come the last rank says, which has the generators that draw
    their tokens."""

    def __init__(self, line: Line, asked_to_stop: Callable[[], bool]):
        super().__init__(line.ranks, asked_to_stop)
        self._line = line

    def lanes(self, num_lanes: int, phase: Phase) -> tuple[int, Phase]:
        """What was asked for. Raises Interrupted where a rank was asked to stop, and PeerEnded."""
        if self._has_stopped:
            raise Interrupted(STOPPED)
        while self._met({KIND: LANES, STOPPING: self._asked_to_stop()})[0][KIND] == STATES:
            self._keep(self.ranks.exchange(self._own_states()))
        return num_lanes, phase

    def all_states(self) -> dict[int, Unfinished]:
        """What the last rank says; of rank 0 alone, between two passes or behind the last one. Where it cannot be asked
        any more, what it said last counts."""
        try:
            if not self._has_stopped:
                self._met({KIND: STATES})
                self._keep(self.ranks.exchange(self._own_states()))
        except Interrupted:
            self._has_stopped = True
        return {place: self._known[place] for place in self.states() if place in self._known}

    def stop(self) -> None:
        """Has the others stop before their next pass, unless all are about to."""
        try:
            if not self._has_stopped:
                self._met({KIND: LANES, STOPPING: True})
        except Interrupted:
            self._has_stopped = True

    def _met(self, message: Message) -> list[Message]:
        """Raises Interrupted where a rank stops, and has then heard the last one; and PeerEnded."""
        met = self.ranks.exchange(message)
        if any(each.get(STOPPING) for each in met):
            self._has_stopped = True
            self._keep(self.ranks.exchange(self._own_states()))
            raise Interrupted(STOPPED)
        return met

    def _own_states(self) -> Message:
        return super()._own_states() if self._line.is_last else {KIND: STATES}

    def _keep(self, met: list[Message]) -> None:
        self._known = read_states(met[-1]["states"])
