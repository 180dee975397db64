"""What a lane asks of the engine when its forward pass reaches a point where the engine must act."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from greenlet import getcurrent, greenlet


@dataclass(frozen=True, slots=True)
class NeedStage:
    """A stage's module is entered; the answer is its weights by parameter name."""

    stage: int


@dataclass(slots=True, eq=False)
class NeedAttention:
    """A layer's attention is due; the answer is what `compute` returns. It may be called on any thread, and reads
    nothing that the lane changes before it has the answer. `is_decode`: of single new tokens, which is what a CPU's
    workers are for; prompts are left to the threads of torch."""

    compute: Callable[[], torch.Tensor]
    is_decode: bool


@dataclass(slots=True, eq=False)
class NeedExperts:
    """A layer's experts are due; the answer is (T, hidden).

    `module` is transformers' experts module, whose parameters are bound while the lane is inside the stage.
    """

    module: torch.nn.Module
    hidden_TD: torch.Tensor
    top_k_index_TK: torch.Tensor
    top_k_weights_TK: torch.Tensor


Event: TypeAlias = NeedStage | NeedAttention | NeedExperts
Weights = Mapping[str, torch.Tensor]


@dataclass(kw_only=True)
class HeadSlices:
    """Where the model's head is run over some of a pass's tokens at a time: `selected_N` are their places among all,
    `begin` and `end` those of `selected_N` that come next. `owner` is the model below the head, `output` what it has
    returned, `hidden_1ND` its hidden states of the selected tokens; None until it has run. `is_below`: nothing is
    wanted of the head, and the pass ends where it would begin. `as_rows`: each selected token is a row of its own."""

    selected_N: torch.Tensor
    owner: object = None
    begin: int = 0
    end: int = 0
    output: object = None
    hidden_1ND: torch.Tensor | None = None
    skips_head: bool = False
    as_rows: bool = False

    def iterate(self, num_rows: int) -> Iterator[slice]:
        """Up to `num_rows` of the selected tokens at a time, which then are those that come next."""
        count = len(self.selected_N)
        for self.begin in range(0, count, num_rows):
            self.end = min(self.begin + num_rows, count)
            yield slice(self.begin, self.end)

    def next_hidden(self, hidden_1ND: torch.Tensor) -> torch.Tensor:
        """The hidden states of those that come next, (1, n, D), or (n, 1, D) as rows."""
        part = hidden_1ND[:, self.begin : self.end]
        return part.transpose(0, 1) if self.as_rows else part


class LaneRun(greenlet):
    """One forward pass of a lane. The attention function finds the lane's KV cache here, as the pass's own greenlet.

    `lengths`, (1, T) or (B, T) on the CPU: of each token, that of its sequence, where rotary embeddings depend on it.
    `head`: what the model's head is given a slice of at a time; None where it is given all. Where ranks divide the
    layers, `entering` is memory for the hidden states that come from the rank before, and `leaving` those that go on to
    the one behind.
    """

    def __init__(self, forward: Callable[[], object], cache: object, lengths: torch.Tensor | None = None):
        super().__init__(forward)
        self.cache, self.lengths = cache, lengths
        self.head: HeadSlices | None = None
        self.entering: torch.Tensor | None = None
        self.leaving: torch.Tensor | None = None


def current_lane_run() -> LaneRun:
    """The pass inside which it is called."""
    run = getcurrent()
    assert isinstance(run, LaneRun), "asked outside a lane"
    return run


def need_stage(stage: int) -> Weights:
    """Called inside a lane: parks it until the engine hands in the stage's weights."""
    return _switch_to_engine(_need_stage(stage))


_need_stage = cache(NeedStage)  # one for each: lanes ask millions of times


def need_tensor(event: NeedAttention | NeedExperts) -> torch.Tensor:
    """Called inside a lane: parks it until the engine hands in what the event asks for."""
    return _switch_to_engine(event)


def _switch_to_engine(event: Event):
    parent = getcurrent().parent
    assert parent is not None, f"{type(event).__name__} was asked outside a lane"
    return parent.switch(event)
