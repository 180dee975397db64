"""Events that a lane sends to the engine from within its forward pass. A lane is a micro-batch, with the greenlet that
runs the model's forward for it. The greenlet is suspended until the engine provides what the event asks for.

A stage is the weights of one part of the forward, such as a layer.
Shapes: T tokens of D features, K experts per token, N selected tokens, n of them in a slice.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from greenlet import getcurrent, greenlet


@dataclass(frozen=True, slots=True)
class NeedStage:
    """The forward enters a stage. The engine provides its weights: parameter name -> tensor."""

    stage: int


@dataclass(slots=True, eq=False)
class NeedAttention:
    """The forward needs a layer's attention. The engine provides the result of `compute`, which any thread may call.
    `is_decode`: there is one new token per sequence; CPU workers may compute it. Prefill runs on torch's threads."""

    compute: Callable[[], torch.Tensor]  # must not read anything that the lane changes before it has the result
    is_decode: bool


@dataclass(slots=True, eq=False)
class NeedExperts:
    """The forward needs the output (T, D) of a layer's experts. `module`: transformers' experts module, whose
    parameters are the stage's weights while the lane is inside the stage. `top_k_*`: the experts of each token."""

    module: torch.nn.Module
    hidden_TD: torch.Tensor
    top_k_index_TK: torch.Tensor
    top_k_weights_TK: torch.Tensor


Event: TypeAlias = NeedStage | NeedAttention | NeedExperts
Weights = Mapping[str, torch.Tensor]


@dataclass(kw_only=True)
class HeadSlices:
    """State for running the model's head over slices of a pass's tokens, since the logits of all would need much
    memory. `begin` and `end`: the current slice of `selected_N`."""

    selected_N: torch.Tensor  # indices of the tokens that need logits
    owner: object = None  # the base model, whose output is the head's input
    begin: int = 0
    end: int = 0
    output: object = None  # of the base model, which runs once for all slices
    hidden_1ND: torch.Tensor | None = None  # of the selected tokens, once the base model has run
    skips_head: bool = False  # the pass ends before the head
    as_rows: bool = False  # the head gets each selected token as a row of a batch

    def iterate(self, num_rows: int) -> Iterator[slice]:
        """Yields slices of up to `num_rows` selected tokens, and sets `begin` and `end` to each."""
        count = len(self.selected_N)
        for self.begin in range(0, count, num_rows):
            self.end = min(self.begin + num_rows, count)
            yield slice(self.begin, self.end)

    def next_hidden(self, hidden_1ND: torch.Tensor) -> torch.Tensor:
        """Selects the hidden states of the current slice: (1, n, D), or (n, 1, D) if `as_rows`."""
        part = hidden_1ND[:, self.begin : self.end]
        return part.transpose(0, 1) if self.as_rows else part


class LaneRun(greenlet):
    """One forward pass of a lane. Attention functions find the lane's KV cache in the current greenlet.

    `lengths`: the sequence length for each token, if rotary embeddings depend on it, (1, T) or (rows, T) on the CPU.
    `head`: slices for the model's head; None runs the head on all tokens. With pipeline parallelism, `hidden_in` is the
    buffer for the previous rank's hidden states, and `hidden_out` has the hidden states for the next rank.
    `keeps_hidden`: all tokens get hidden states, and `hidden_1TD` has those that the head gets, after the base model.
    """

    def __init__(
        self,
        forward: Callable[[], object],
        cache: object,
        lengths: torch.Tensor | None = None,
        *,
        keeps_hidden: bool = False,
    ):
        super().__init__(forward)
        self.cache, self.lengths, self.keeps_hidden = cache, lengths, keeps_hidden
        self.hidden_1TD: torch.Tensor | None = None
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


_need_stage = cache(NeedStage)  # one object per stage, since lanes send the event millions of times


def need_tensor(event: NeedAttention | NeedExperts) -> torch.Tensor:
    """Suspends the lane until the engine provides the event's result. Call inside a lane."""
    return _switch_to_engine(event)


def _switch_to_engine(event: Event):
    parent = getcurrent().parent
    assert parent is not None, f"{type(event).__name__} was sent outside a lane"
    return parent.switch(event)
