"""What a lane asks of the engine when its forward pass reaches a point where the engine must act."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from greenlet import getcurrent, greenlet


@dataclass(frozen=True, slots=True)
class NeedStage:
    """A stage's module is entered; the answer is its weights by parameter name."""

    stage: int


class LaneRun(greenlet):
    """One forward pass of a lane. The attention function finds the lane's KV cache here, as the pass's own greenlet."""

    def __init__(self, forward: Callable[[], object], cache: object):
        super().__init__(forward)
        self.cache = cache


Weights = Mapping[str, torch.Tensor]


def need_stage(stage: int) -> Weights:
    """Called inside a lane: parks it until the engine hands in the stage's weights."""
    parent = getcurrent().parent
    assert parent is not None, "a streamed module was called outside a lane"
    return parent.switch(NeedStage(stage))
