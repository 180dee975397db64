"""Finds the checkpoint bytes of each parameter by reading transformers' renamings and converters, without running them.

Many converters only stack experts or concatenate rows. Their result is a sequence of whole tensors or row ranges of the
checkpoint (pieces, each a `TensorSlice`), so nothing is copied. Converters that permute elements must be run once;
these are returned as `Conversion`.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from ..errors import CheckpointError
from ..formats.registry import is_output_major, require_readable
from ..plan.shape.shapes import Parameter, TensorSlice
from .conversions import Conversion, ConverterUse
from .stage_weights import is_plain

Pieces = tuple[tuple[TensorSlice, ...], ...]  # for each expert (one if not stacked): slices to concatenate by rows
Collected = dict[str, list[TensorSlice]]  # source pattern of a converter -> checkpoint tensors that match it


def map_weights(
    model: PreTrainedModel, tensors: Mapping[str, TensorSlice], *, use_byte_ranges: bool = True
) -> tuple[dict[str, Parameter], list[Conversion]]:
    """Returns parameters by full name, and the conversions to run (see conversions.py) for all other parameters.
    `model` is on the meta device. With `use_byte_ranges=False` (for tests) every converter becomes a conversion.

    Raises CheckpointError if a parameter has no tensor, or the tensor has another shape.
    """
    plain, uses = match_tensors(model, tensors, get_model_conversion_mapping(model))
    parameters = model.state_dict().keys()
    uses = [use for use in uses if not parameters.isdisjoint(use.targets)]
    pieces: dict[str, Pieces] = {}  # by parameter name
    stacked: set[str] = set()  # names of parameters that are stacks of experts
    conversions = list[Conversion]()
    for name, tensor in plain.items():
        module = model.get_submodule(name.rpartition(".")[0]) if name in parameters else None
        if isinstance(module, Conv1D) and is_output_major(tensor):
            tensor = replace(tensor, is_transposed=True)  # Conv1D declares (in, out); the format stores (out, in)
        experts = expert_pieces(tensor)
        pieces[name] = experts or ((tensor,),)
        stacked.update([name] if experts else [])
    for use in uses:
        targets = _as_pieces(use) if use_byte_ranges else None
        if targets is None:
            conversions.append(use.conversion)
        else:
            pieces.update(targets)
            if any(isinstance(op, MergeModulelist) for op in use.converter.operations):
                stacked.update(targets)
    return build_parameters(model, pieces, stacked, conversions), conversions


def expert_pieces(tensor: TensorSlice) -> Pieces:
    """Returns the matrices of a stack that is quantized or transposed; () for any other tensor."""
    if len(tensor.shape) != 3 or (is_plain(tensor) and not tensor.is_transposed):
        return ()
    return tuple((tensor.expert(index),) for index in range(tensor.shape[0]))


def build_parameters(
    model: PreTrainedModel, pieces: Mapping[str, Pieces], stacked: Collection[str], conversions: Sequence[Conversion]
) -> dict[str, Parameter]:
    """Returns parameters by full name, except targets of `conversions`. `pieces`, `stacked`: see `map_weights`. Raises
    CheckpointError if a parameter has no pieces or their combined shape differs."""
    converted = {target for conversion in conversions for target in conversion.targets}
    buffers = dict(model.named_buffers())
    owners: dict[int, str] = {}  # id of a parameter -> the name under which the checkpoint stores it
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in pieces:
            owners.setdefault(id(parameter), name)
    result, missing = dict[str, Parameter](), list[str]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        source = name if name in pieces else owners.get(id(tensor))  # tied parameters share bytes
        if source is not None:
            result[name] = Parameter(
                name=name, shape=tuple(tensor.shape), pieces=pieces[source], is_stacked=source in stacked
            )
            shape = _combined_shape(result[name])
            if _without_ones(shape) != _without_ones(tensor.shape):
                piece = pieces[source][0][0]
                raise CheckpointError(
                    f"{piece.file}: tensor {piece.name!r} makes a parameter of shape {shape}, "
                    f"but the model's {name!r} is {tuple(tensor.shape)}: does config.json belong to these weights?"
                )
        elif name not in buffers and name not in converted:
            missing.append(name)
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} parameters of {type(model).__name__}, first {missing[0]!r}: "
            "does config.json belong to these weights?"
        )
    return result


def match_tensors(
    model: PreTrainedModel, tensors: Mapping[str, TensorSlice], transforms: Iterable[WeightTransform]
) -> tuple[dict[str, TensorSlice], list[ConverterUse]]:
    """Matches checkpoint tensors with transformers' renamings and converters (`transforms`). Returns tensors that are
    only renamed, by parameter name, and the uses of converters for all other tensors."""
    transforms = list(transforms)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    plain: dict[str, TensorSlice] = {}
    grouped: dict[str, Collected] = {}
    for key in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if target not in state and key in state:  # the file uses the class's own names
            plain[key] = tensors[key]
        elif pattern is None:
            plain[target] = tensors[key]
        else:
            grouped.setdefault(target, defaultdict(list))[pattern].append(tensors[key])
    uses = [
        ConverterUse(first_target=target, converter=by_pattern[next(iter(collected))], collected=dict(collected))
        for target, collected in grouped.items()
    ]
    return plain, uses


def _as_pieces(use: ConverterUse) -> dict[str, Pieces] | None:
    """Returns the pieces of each target; None if the converter must be run. Raises CheckpointError for missing
    experts."""
    converter, collected = use.converter, use.collected
    kinds = [(type(op), getattr(op, "dim", None)) for op in converter.operations]
    sources = [collected[pattern] for pattern in converter.source_patterns if pattern in collected]
    if kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        if len({len(source) for source in sources}) != 1:
            raise CheckpointError(f"{use.first_target}: the checkpoint lacks tensors of some experts")
        return {use.first_target: tuple(zip(*sources, strict=True))}
    if kinds == [(Concatenate, 0)]:
        return {use.first_target: (tuple(piece for source in sources for piece in source),)}
    if kinds == [(Chunk, 0)] and len(sources) == 1 and len(sources[0]) == 1:
        parts = [sources[0][0].row_part(index, len(use.targets)) for index in range(len(use.targets))]
        pieces = {target: ((part,),) for target, part in zip(use.targets, parts, strict=True) if part is not None}
        return pieces if len(pieces) == len(parts) else None
    return None


def _combined_shape(parameter: Parameter) -> tuple[int, ...]:
    """Returns the shape of a parameter's combined pieces. A dimension is 0 if it differs between pieces."""
    heights = {sum(piece.shape[0] if piece.shape else 1 for piece in blocks) for blocks in parameter.pieces}
    tails = {piece.shape[1:] for blocks in parameter.pieces for piece in blocks}
    shape = (heights.pop() if len(heights) == 1 else 0, *(tails.pop() if len(tails) == 1 else (0,)))
    if parameter.is_transposed:
        shape = shape[::-1]
    return (len(parameter.pieces), *shape) if parameter.is_stacked else shape


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def init_computed_parameters(model: PreTrainedModel, names: Collection[str]) -> None:
    """Replaces parameters that the class computes and does not save, such as sinusoidal positions, by CPU buffers with
    the class's initial values. Keeps those in `names`, the checkpoint's tensors. Mutates `model`, which is on the meta
    device."""
    patterns = model._keys_to_ignore_on_save or ()
    for name in [name for name, _ in model.named_parameters()]:
        if name not in names and any(re.search(pattern, name) for pattern in patterns):
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            empty = torch.empty_like(module.get_parameter(leaf), device="cpu")
            value = nn.Parameter(empty, requires_grad=False)
            module._parameters[leaf] = value
            model._init_weights(module)
            del module._parameters[leaf]
            module.register_buffer(leaf, value.data, persistent=False)


def pop_quantization_config(config: PreTrainedConfig) -> Mapping[str, object]:
    """Removes the quantization settings from `config`, so that the model is built unquantized, and returns them ({} if
    there are none). Raises CheckpointError for an unsupported method."""
    settings: dict[str, object] = {}
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            settings = settings or dict(getattr(part, key, None) or {})
            if hasattr(part, key):
                delattr(part, key)
    if settings:
        require_readable(str(settings.get("quant_method") or "bitsandbytes"))
    return settings
