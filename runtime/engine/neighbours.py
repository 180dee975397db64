"""The lanes of a rank whose layers are a part of the model's: their hidden states come from the rank before and go to
the one behind, and the last rank draws the tokens of all.
"""

from collections.abc import Sequence

import torch

from ..ranks.line import Line
from ..stream.device import ComputeDevice
from .lanes.lane import Lane


class Neighbours:
    """Those of one session. `num_numbers`: what is told of each token that is drawn. What an accelerator computes goes
    by way of host memory."""

    def __init__(self, line: Line, num_numbers: int, device: ComputeDevice):
        self._line, self._num_numbers, self._device = line, num_numbers, device
        self._lanes: Sequence[Lane] = ()
        self._come: Sequence[torch.Tensor | None] = ()  # what each lane is sent, in host memory

    def begin(self, lanes: Sequence[Lane]) -> None:
        """A pass of these lanes, which have come to the first stage of this rank."""
        self._lanes = lanes
        self._come = [self._beside(lane.entering) for lane in lanes]
        self._line.begin(self._come)

    def receive(self, lane: int) -> None:
        """Returns when the lane's hidden states are there."""
        self._line.receive(lane)
        come, entering = self._come[lane], self._lanes[lane].entering
        if come is not None and entering is not None and come is not entering:
            entering.copy_(come, non_blocking=True)

    def send(self, lane: int) -> None:
        """Begins to send what the lane has come to."""
        leaving = self._lanes[lane].leaving
        assert leaving is not None, f"lane {lane} has not left this rank's layers"
        self._line.send(lane, *self._device.brought([leaving]))

    def drawn(self, lanes: Sequence[Lane]) -> Sequence[torch.Tensor]:
        """What the last rank has drawn for each lane, in host memory."""
        self._lanes = ()
        if self._line.is_last:
            drawn = self._device.brought([lane.draw() for lane in lanes])
            self._line.tell(torch.cat([each.reshape(-1) for each in drawn]))
            return drawn
        counts = [lane.expect() for lane in lanes]
        whole = torch.empty(sum(counts) * self._num_numbers, dtype=torch.int32)
        self._line.heard(whole)
        self._device.finish()  # what was sent here has left host memory
        self._come = ()
        return whole.view(-1, self._num_numbers).split(counts)

    def _beside(self, target: torch.Tensor | None) -> torch.Tensor | None:
        """Host memory for what is to come into `target`: that itself, unless an accelerator has it."""
        if target is None or not self._device.is_accelerator:
            return target
        return self._device.host_pages(target.nbytes)[: target.nbytes].view(target.dtype).view(target.shape)
