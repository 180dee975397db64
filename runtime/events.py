"""Events that a lane sends to the engine from within its forward pass. A lane is a greenlet that runs the model's
forward for one micro-batch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from greenlet import getcurrent, greenlet


@dataclass(frozen=True, slots=True)
class NeedStage:
    """A stage's module is entered. The engine answers with its weights by parameter name."""

    stage: int


@dataclass(slots=True, eq=False)
class NeedAttention:
    """A layer's attention is due. The engine answers with the result of `compute`, which any thread may call.
    `is_decode`: one new token per sequence, for CPU workers; prefill runs on torch's threads."""

    compute: Callable[[], torch.Tensor]  # must not read what the lane changes before it has the answer
    is_decode: bool


@dataclass(slots=True, eq=False)
class NeedExperts:
    """A layer's experts are due. The engine answers with their output (T, hidden). `module` is the transformers experts
    module; its parameters are bound while the lane is inside the stage."""

    module: torch.nn.Module
    hidden_TD: torch.Tensor
    top_k_index_TK: torch.Tensor
    top_k_weights_TK: torch.Tensor


Event: TypeAlias = NeedStage | NeedAttention | NeedExperts
Weights = Mapping[str, torch.Tensor]


@dataclass(kw_only=True)
class HeadSlices:
    """State for running the model's head over slices of a pass's tokens. `begin` and `end` delimit the current slice of
    `selected_N`."""

    selected_N: torch.Tensor  # token indices
    owner: object = None  # the base model below the head
    begin: int = 0
    end: int = 0
    output: object = None  # of the base model
    hidden_1ND: torch.Tensor | None = None  # of the selected tokens, once the base model has run
    skips_head: bool = False  # the pass ends before the head
    as_rows: bool = False  # each selected token is a batch row

    def iterate(self, num_rows: int) -> Iterator[slice]:
        """Yields slices of up to `num_rows` selected tokens, and sets `begin` and `end` to each."""
        count = len(self.selected_N)
        for self.begin in range(0, count, num_rows):
            self.end = min(self.begin + num_rows, count)
            yield slice(self.begin, self.end)

    def next_hidden(self, hidden_1ND: torch.Tensor) -> torch.Tensor:
        """The hidden states of the current slice: (1, n, D), or (n, 1, D) if `as_rows`."""
        part = hidden_1ND[:, self.begin : self.end]
        return part.transpose(0, 1) if self.as_rows else part


class LaneRun(greenlet):
    """One forward pass of a lane. Attention functions find the lane's KV cache in the current greenlet.

    `lengths`, (1, T) or (B, T) on the CPU: the sequence length for each token, if rotary embeddings depend on it.
    `head`: slices for the model's head, None to run it on all tokens. With pipeline parallelism, `hidden_in` receives
    hidden states from the previous rank and `hidden_out` holds those for the next rank.
    """

    def __init__(self, forward: Callable[[], object], cache: object, lengths: torch.Tensor | None = None):
        super().__init__(forward)
        self.cache, self.lengths = cache, lengths
        self.head: HeadSlices | None = None
        self.hidden_in: torch.Tensor | None = None
        self.hidden_out: torch.Tensor | None = None


def current_lane_run() -> LaneRun:
    run = getcurrent()
    assert isinstance(run, LaneRun), "called outside a lane"
    return run


def need_stage(stage: int) -> Weights:
    """Suspends the lane until the engine provides the stage's weights. Call inside a lane."""
    return _switch_to_engine(_need_stage(stage))


_need_stage = cache(NeedStage)  # one object per stage: lanes send it millions of times


def need_tensor(event: NeedAttention | NeedExperts) -> torch.Tensor:
    """Suspends the lane until the engine provides the event's result. Call inside a lane."""
    return _switch_to_engine(event)


def _switch_to_engine(event: Event):
    parent = getcurrent().parent
    assert parent is not None, f"{type(event).__name__} was sent outside a lane"
    return parent.switch(event)
