"""The last decoder layer of a pass with prompts: all tokens leave keys and values there, but only the last one of a
prompt that ends, and those that are decoded, go on to the head. The others stop where they are cached.

Of a model of L layers that leaves out nearly 1/L of a prefill. It needs no knowledge of the class: what a packed lane
runs treats tokens one by one but in attention, so a layer gives a token the same whichever others are beside it.
"""

from collections.abc import Callable
from typing import Any

import torch
from greenlet import getcurrent

from ..cache.paged import PagedKV, StoredAlone
from ..events import LaneRun
from ..plan.cost.lane_work import is_narrow

Narrow = Callable[[torch.Tensor], torch.Tensor]


def forward_selected(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `layer(*args, **kwargs)` returns; zeros for tokens that nobody asks for."""
    run = getcurrent()
    cache = run.cache if isinstance(run, LaneRun) else None
    if not isinstance(cache, PagedKV) or not is_narrow(cache.num_tokens, cache.num_selected):
        return layer(*args, **kwargs)
    index = _index(layer)
    if index is None:
        return layer(*args, **kwargs)
    selected_B, num_tokens = cache.selected_B, cache.num_tokens
    try:
        few, few_named = (_narrowed(arguments, selected_B, num_tokens) for arguments in (args, kwargs))
    except _NotByTokenError:
        return layer(*args, **kwargs)
    try:
        with cache.storing_alone(index):
            return layer(*args, **kwargs)  # it stores nothing, or not here, and has gone on
    except StoredAlone:
        pass
    with cache.selected_alone():
        out = layer(*few, **few_named)
    if isinstance(out, tuple):
        return (_widened(out[0], selected_B, num_tokens), *out[1:])
    return _widened(out, selected_B, num_tokens)


def _index(layer: torch.nn.Module) -> int | None:
    """Returns the index of its cache. None where it attends twice, as LongCat-Flash does: all tokens must go on then
    from the first attention."""
    found = {getattr(module, "layer_idx", None) for module in layer.modules()} - {None}
    return found.pop() if len(found) == 1 else None


class _NotByTokenError(Exception):
    """A tensor has as many numbers as there are tokens along a dimension where classes have no tokens."""


def _narrowed(value: Any, selected_B: torch.Tensor, num_tokens: int) -> Any:
    """Takes of tensors (1, T, ...) or (T), in whatever holds them, the selected tokens."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 1 and value.shape[:2] == (1, num_tokens):
            return value[:, selected_B]
        if value.shape == (num_tokens,):
            return value[selected_B]
        if num_tokens in value.shape:
            raise _NotByTokenError
        return value
    if isinstance(value, dict):
        return {key: _narrowed(each, selected_B, num_tokens) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_narrowed(each, selected_B, num_tokens) for each in value)
    return value


def _widened(out: torch.Tensor, selected_B: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """(1, B, ...) to (1, T, ...)."""
    whole = out.new_zeros(1, num_tokens, *out.shape[2:])
    whole[:, selected_B] = out
    return whole
