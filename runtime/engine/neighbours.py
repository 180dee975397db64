"""The lanes of a rank whose layers are a part of the model's: their hidden states come from the rank before and go to
the one behind, and the last rank draws the tokens of all.
"""

from collections.abc import Callable, Sequence

import torch

from ..ranks.line import Line
from .lanes.lane import Lane


class Neighbours:
    """Those of one session. `num_numbers`: what is told of each token that is drawn."""

    def __init__(self, line: Line, num_numbers: int):
        self._line, self._num_numbers = line, num_numbers
        self._lanes: Sequence[Lane] = ()

    def begin(self, lanes: Sequence[Lane]) -> None:
        """A pass of these lanes, which have come to the first stage of this rank."""
        self._lanes = lanes
        self._line.begin([lane.entering for lane in lanes])

    def receive(self, lane: int) -> None:
        """Returns when the lane's hidden states are there."""
        self._line.receive(lane)

    def send(self, lane: int) -> None:
        """Begins to send what the lane has come to."""
        leaving = self._lanes[lane].leaving
        assert leaving is not None, f"lane {lane} has not left this rank's layers"
        self._line.send(lane, leaving)

    def drawn(
        self, lanes: Sequence[Lane], brought: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        """What the last rank has drawn for each lane. `brought` takes it to host memory."""
        self._lanes = ()
        if self._line.is_last:
            drawn = brought([lane.draw() for lane in lanes])
            self._line.tell(torch.cat([each.reshape(-1) for each in drawn]))
            return drawn
        counts = [lane.expect() for lane in lanes]
        whole = torch.empty(sum(counts) * self._num_numbers, dtype=torch.int32)
        self._line.heard(whole)
        return whole.view(-1, self._num_numbers).split(counts)
