"""What a lane asks of the engine when its forward pass reaches a point where the engine must act."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from greenlet import getcurrent


@dataclass(frozen=True, slots=True)
class NeedStage:
    """A stage's module is entered; the answer is its weights by parameter name."""

    stage: int


Weights = Mapping[str, torch.Tensor]


def need_stage(stage: int) -> Weights:
    """Called inside a lane: parks it until the engine hands in the stage's weights."""
    parent = getcurrent().parent
    assert parent is not None, "a streamed module was called outside a lane"
    return parent.switch(NeedStage(stage))
