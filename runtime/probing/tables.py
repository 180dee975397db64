"""Finds embedding tables of which the class only looks up rows, so that other rows need not be read."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from .empty_weights import NUM_LAYERS, PROBE_ERRORS, ProbeEnded, copy_with_random_values
from .layer_lists import layer_lists

log = logging.getLogger(__name__)

NUM_TOKENS = 3


class _ProbedTable(torch.Tensor):
    """A table that records how the class uses it. Anything but a lookup of rows, or reading its shape, dtype or device,
    makes `is_table` false."""

    is_table: bool
    num_ids: int  # looked up

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        tables = [value for value in (*args, *kwargs.values()) if isinstance(value, _ProbedTable)]
        ids = args[0] if args else kwargs.get("input")
        if func is F.embedding and isinstance(ids, torch.Tensor):
            for table in tables:
                table.num_ids += ids.numel()
        elif func is torch.Tensor.__getitem__:
            # One row, such as the padding token's.
            is_row = len(args) == 2 and (
                type(args[1]) is int or (isinstance(args[1], tuple) and type(args[1][0]) is int)
            )
            tables[0].is_table &= is_row
        elif func not in _READS:
            for table in tables:
                table.is_table = False
        with torch._C.DisableTorchFunctionSubclass():
            return func(*map(_plain, args), **{key: _plain(value) for key, value in kwargs.items()})


_READS = frozenset(  # attributes that say nothing of the numbers
    vars(torch.Tensor)[name].__get__ if name in vars(torch.Tensor) else getattr(torch._C.TensorBase, name).__get__
    for name in ("shape", "dtype", "device", "is_meta", "ndim", "requires_grad", "is_cpu", "is_cuda")
) | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel}


def _plain(value: object) -> object:
    return value.as_subclass(torch.Tensor) if isinstance(value, _ProbedTable) else value


def find_tables(model: PreTrainedModel) -> dict[str, float]:
    """Full names of the embedding tables of which the class only looks up rows, with the rows that it looks up for each
    token. `model` is not changed. Empty for an encoder-decoder, and for a class that does not run without weights."""
    if model.config.is_encoder_decoder:
        return {}
    layers = [layer for part in layer_lists(model) for layer in part.layers[NUM_LAYERS:]]
    has_late_tables = any(isinstance(module, nn.Embedding) for layer in layers for module in layer.modules())
    try:
        return _probe(copy_with_random_values(model, num_layers=None if has_late_tables else NUM_LAYERS))
    except PROBE_ERRORS as error:
        log.debug("%s: no tables, as the class does not run without weights (%s)", type(model).__name__, error)
        return {}


@torch.no_grad()
def _probe(probe: PreTrainedModel) -> dict[str, float]:
    tables = dict[str, _ProbedTable]()
    for path, module in probe.named_modules():
        if isinstance(module, nn.Embedding):
            table = module.weight.data.as_subclass(_ProbedTable)
            table.is_table, table.num_ids = True, 0
            # Not through `nn.Parameter`, which would not stay a `_ProbedTable`.
            module._parameters["weight"] = table  # pyright: ignore[reportArgumentType]
            tables[f"{path}.weight"] = table
    positions_1T = torch.arange(NUM_TOKENS)[None]
    with suppress(ProbeEnded):
        probe(input_ids=torch.ones_like(positions_1T), position_ids=positions_1T, use_cache=False)
    return {name: table.num_ids / NUM_TOKENS for name, table in tables.items() if table.is_table and table.num_ids}
