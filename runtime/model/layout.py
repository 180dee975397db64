"""Which checkpoint bytes are which model parameter: transformers' own renamings and converters, read as a map, not run.

A converter that stacks experts or concatenates rows only says in which order contiguous pieces lie; `pieces` keeps
that order and
nothing is copied. A converter that permutes elements cannot be said so: its targets are returned as `inexpressible`.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ..errors import CheckpointError
from ..plan.shapes import Parameter, TensorSlice

Pieces = tuple[tuple[TensorSlice, ...], ...]
Collected = dict[str, list[TensorSlice]]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The converter of one group of targets and the checkpoint tensors that it takes, by source pattern."""

    first_target: str
    converter: WeightConverter
    collected: Mapping[str, list[TensorSlice]]

    @property
    def targets(self) -> tuple[str, ...]:
        """Full names: the converter's own target patterns in the place of the one that `first_target` shows."""
        patterns = self.converter.target_patterns
        shown = next(pattern for pattern in patterns if pattern in self.first_target)
        return tuple(self.first_target.replace(shown, pattern) for pattern in patterns)


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """Parameters by full model name. `inexpressible` conversions must be carried out (see converted.py)."""

    parameters: Mapping[str, Parameter]
    inexpressible: tuple[Conversion, ...]


def map_weights(model: PreTrainedModel, tensors: Mapping[str, TensorSlice], *, express: bool = True) -> WeightMap:
    """`model` is on the meta device. With `express=False` every conversion is reported as inexpressible (for tests).

    Raises CheckpointError when a parameter has no tensor or a tensor has another shape than its parameter.
    """
    plain, conversions = _match(model, tensors)
    pieces: dict[str, Pieces] = {name: ((tensor,),) for name, tensor in plain.items()}
    stacked: set[str] = set()
    inexpressible = []
    for conversion in conversions:
        found = _express(conversion) if express else None
        if found is None:
            inexpressible.append(conversion)
        else:
            pieces.update(found)
            if any(isinstance(op, MergeModulelist) for op in conversion.converter.operations):
                stacked.update(found)
    later = {target for conversion in inexpressible for target in conversion.targets}
    parameters = _parameters(model, pieces, stacked, later)
    return WeightMap(parameters=parameters, inexpressible=tuple(inexpressible))


def _match(
    model: PreTrainedModel, tensors: Mapping[str, TensorSlice]
) -> tuple[dict[str, TensorSlice], list[Conversion]]:
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    plain: dict[str, TensorSlice] = {}
    grouped: dict[str, Collected] = {}
    for key in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if pattern is None:
            plain[target] = tensors[key]
        else:
            grouped.setdefault(target, defaultdict(list))[pattern].append(tensors[key])
    conversions = [
        Conversion(first_target=target, converter=by_pattern[next(iter(collected))], collected=dict(collected))
        for target, collected in grouped.items()
    ]
    return plain, conversions


def _express(conversion: Conversion) -> dict[str, Pieces] | None:
    converter, collected = conversion.converter, conversion.collected
    kinds = [(type(op), getattr(op, "dim", None)) for op in converter.operations]
    sources = [collected[pattern] for pattern in converter.source_patterns if pattern in collected]
    if kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        if len({len(source) for source in sources}) != 1:
            raise CheckpointError(
                f"{conversion.first_target}: its experts do not all have the same parts in the checkpoint"
            )
        return {conversion.first_target: tuple(zip(*sources, strict=True))}
    if kinds == [(Concatenate, 0)]:
        return {conversion.first_target: (tuple(piece for source in sources for piece in source),)}
    if kinds == [(Chunk, 0)] and len(sources) == 1 and len(sources[0]) == 1:
        targets = conversion.targets
        return {target: ((_rows(sources[0][0], turn, len(targets)),),) for turn, target in enumerate(targets)}
    return None


def _rows(tensor: TensorSlice, turn: int, num_parts: int) -> TensorSlice:
    """The `turn`-th of equal runs of rows."""
    part = tensor.num_bytes // num_parts
    return replace(
        tensor,
        name=f"{tensor.name}[{turn}/{num_parts}]",
        offset=tensor.offset + turn * part,
        num_bytes=part,
        shape=(tensor.shape[0] // num_parts, *tensor.shape[1:]),
    )


def _parameters(
    model: PreTrainedModel, pieces: dict[str, Pieces], stacked: set[str], later: set[str]
) -> dict[str, Parameter]:
    buffers = dict(model.named_buffers())
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in pieces:
            owners.setdefault(id(parameter), name)
    result, missing = {}, []
    for name, tensor in model.state_dict(keep_vars=True).items():
        source = name if name in pieces else owners.get(id(tensor))  # tied: the same bytes under another name
        if source is not None:
            result[name] = Parameter(
                name=name, shape=tuple(tensor.shape), pieces=pieces[source], is_stacked=source in stacked
            )
            _check_shape(result[name])
        elif name not in buffers and name not in later:
            missing.append(name)
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} parameters of {type(model).__name__}, first {missing[0]!r}: "
            "does config.json belong to these weights?"
        )
    return result


def _check_shape(parameter: Parameter) -> None:
    rows = {sum(piece.shape[0] if piece.shape else 1 for piece in blocks) for blocks in parameter.pieces}
    tails = {piece.shape[1:] for piece in parameter.slices}
    found = (*(rows if rows else {0}), *(next(iter(tails)) if tails else ()))
    found = (len(parameter.pieces), *found) if parameter.is_stacked else found
    found = found if parameter.shape else ()
    if len(rows) != 1 or len(tails) != 1 or tuple(found) != parameter.shape:
        raise CheckpointError(
            f"{parameter.slices[0].file}: tensor {parameter.slices[0].name!r} makes a parameter of shape {found}, "
            f"but the model's {parameter.name!r} is {parameter.shape}: does config.json belong to these weights?"
        )


def layer_prefix_pattern(path: str) -> re.Pattern[str]:
    return re.compile(rf"^{re.escape(path)}\.(\d+)\.(.+)$")
