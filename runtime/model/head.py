"""Runs the model's head (the output projection) on a slice of tokens at a time, to bound the memory of logits.

Works with any model class. The base model (everything below the head) is wrapped. The class's forward runs once per
slice: in the first run the base model computes the hidden states of all tokens, in later runs its wrapper returns the
hidden states of the next slice.

Letters: B rows of T tokens; N selected tokens, n in a slice; D hidden size; V vocabulary; C classes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch
from greenlet import getcurrent
from transformers.utils.generic import ModelOutput

from ..errors import ConfigError
from ..events import HeadSlices, LaneRun, current_lane_run
from .stages import StagedModel


class HasLogits(Protocol):
    logits: torch.Tensor


class _HeadSkipped(Exception):
    """Ends the model's forward after the base model, if the head is not needed."""


class BaseModelWrapper(torch.nn.Module):
    """Wraps a module that may be the base model. Of nested wrappers, the first one that a pass calls acts as the base
    model; others just call their module. The acting one runs its module once, and then returns the hidden states of the
    current slice. Without `LaneRun.head`, all wrappers just call their module, and with `LaneRun.keeps_hidden`
    store its hidden states."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def __getattr__(  # pyright: ignore[reportIncompatibleMethodOverride] - model code reads any attribute
        self, name: str
    ) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: object, **kwargs: object) -> object:
        run = getcurrent()
        slices = run.head if isinstance(run, LaneRun) else None
        if slices is None or slices.owner not in (None, self):
            output = self.inner(*args, **kwargs)
            if isinstance(run, LaneRun) and run.keeps_hidden:
                run.hidden_1TD = _hidden_of(output)  # the outermost wrapper is the last
            return output
        if slices.hidden_1ND is None:
            slices.owner = self
            slices.output = self.inner(*args, **kwargs)
            slices.hidden_1ND = _select_hidden(slices.output, slices.selected_N)
            slices.output = _replace_hidden(slices.output, slices.hidden_1ND[:, :0])  # frees the other states
            if slices.skips_head:
                raise _HeadSkipped
        return _replace_hidden(slices.output, slices.next_hidden(slices.hidden_1ND))


def sliced_logits(
    forward: Callable[[], HasLogits], selected_N: torch.Tensor, num_rows: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (index of the slice's first token in `selected_N`, logits (n, V)) for slices of up to `num_rows` selected
    tokens. Must be called in a LaneRun. `forward` runs the model; `selected_N`: indices among its B * T tokens."""
    run = current_lane_run()
    slices = run.head = HeadSlices(selected_N=selected_N)
    try:
        for rows in slices.iterate(num_rows):
            logits = forward().logits
            assert slices.hidden_1ND is not None, "the forward ran the layers without calling a wrapped base model"
            yield rows.start, logits.reshape(-1, logits.shape[-1])
    finally:
        run.head = None


def hidden_states(forward: Callable[[], object], selected_N: torch.Tensor) -> HeadSlices:
    """Computes the hidden states of the selected tokens that are the head's input. Must be called in a LaneRun.
    `forward` runs the model, which may have no head."""
    run = current_lane_run()
    slices = run.head = HeadSlices(selected_N=selected_N, skips_head=True)
    try:
        slices.hidden_1ND = _select_hidden(forward(), selected_N)
    except _HeadSkipped:
        pass
    finally:
        run.head = None
    return slices


def class_logits(model: torch.nn.Module, slices: HeadSlices, ids_N: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns float32 logits (N, C) of a decoder's classifier for the hidden states in `slices`. `ids_N`: the tokens of
    these hidden states. Each is passed as a prompt of one token, since transformers' class pools a prompt's last
    token."""
    run, parts = current_lane_run(), list[torch.Tensor]()
    slices.skips_head, slices.as_rows = False, True
    run.head = slices
    try:
        for rows in slices.iterate(num_rows):
            out = model(input_ids=ids_N[rows, None], use_cache=False)
            parts.append(out.logits.float())
    finally:
        run.head = None
    return torch.cat(parts)


def slice_head(staged: StagedModel) -> None:
    """Wraps the base model, as `sliced_logits` requires. Mutates the model; idempotent. Raises ConfigError if one
    module contains both the layers and the head."""
    if any(isinstance(module, BaseModelWrapper) for module in staged.model.modules()):
        return
    # All modules that contain the decoder's layers but not the head, outer ones first: a class may call any of them.
    last_layer = next(module for module in staged.modules if module.is_last_layer)
    head = staged.model.get_output_embeddings()
    parent, candidates = staged.model, list[tuple[torch.nn.Module, str]]()
    while True:
        name, child = next((name, child) for name, child in parent.named_children() if _contains(child, last_layer))
        if isinstance(child, torch.nn.ModuleList):
            break
        if head is None or not _contains(child, head):
            candidates.append((parent, name))
        parent = child
    if not candidates:
        name = type(staged.model).__name__
        raise ConfigError(f"model.path: {name} cannot score tokens: its layers and its head are in one module")
    for parent, name in candidates:
        setattr(parent, name, BaseModelWrapper(getattr(parent, name)))


def _contains(module: torch.nn.Module, other: torch.nn.Module) -> bool:
    return any(inner is other for inner in module.modules())


def _select_hidden(output: object, selected_N: torch.Tensor) -> torch.Tensor:
    """Selects (1, N, D) of a base model's hidden states (B, T, D), the first item of its output."""
    return _hidden_of(output).flatten(0, 1)[selected_N][None]


def _hidden_of(output: object) -> torch.Tensor:
    hidden = output[0] if isinstance(output, tuple | ModelOutput) else output
    assert isinstance(hidden, torch.Tensor), f"the model below the head returned {type(hidden).__name__}"
    return hidden


def _replace_hidden(output: object, hidden: torch.Tensor) -> object:
    """Returns a base model's output with other hidden states."""
    if isinstance(output, ModelOutput):
        return replace(output, **{next(iter(output)): hidden})  # pyright: ignore[reportArgumentType] - its subclasses are
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
