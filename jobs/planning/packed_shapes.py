"""The sizes of a model as `millrace pack` would store it, or as `model.quantize` has it read, by the storage formats'
own rules: no file is there."""

from collections import Counter
from dataclasses import replace
from math import ceil, prod

from runtime.config import Quantize
from runtime.formats.packing import why_raw
from runtime.formats.registry import FORMATS
from runtime.formats.rounding import Rounding
from runtime.linear.window4_rows import WINDOW4
from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.shapes import Parameter, TensorSlice

from .config import Packed


def as_packed(shape: ModelShape, way: Packed | Quantize) -> ModelShape:
    """`shape` with the bytes that its weights take so. Tensors lie one behind the other in their order; what several
    parameters share is stored once, as the first of them has it."""
    stored, ends = dict[str, TensorSlice](), Counter[str]()
    for parameter in (parameter for stage in shape.stages for parameter in stage.parameters):
        for piece in (piece for entry in parameter.pieces for piece in entry):
            if piece.name not in stored:
                found = _packed(way, parameter, piece)
                stored[piece.name] = replace(found, offset=ends[piece.file])
                ends[piece.file] += found.num_bytes

    def restored(parameter: Parameter) -> Parameter:
        pieces = tuple(tuple(stored[piece.name] for piece in entry) for entry in parameter.pieces)
        return replace(parameter, pieces=pieces)

    stages = (replace(stage, parameters=tuple(map(restored, stage.parameters))) for stage in shape.stages)
    return replace(shape, stages=tuple(stages))


def _packed(way: Packed | Quantize, parameter: Parameter, piece: TensorSlice) -> TensorSlice:
    name = _format_of(way, parameter, piece)
    if name is None:
        return piece
    num_bytes = ceil(prod(piece.shape[:-1]) * FORMATS[name].row_bytes(piece.shape[-1]))
    return replace(piece, format=name, num_bytes=num_bytes)


def _format_of(way: Packed | Quantize, parameter: Parameter, piece: TensorSlice) -> str | None:
    """The storage format of a tensor; None where it stays as it is. A store packs without loss what is not rounded."""
    rounding = None if way is Packed.lossless else Rounding(way.value)
    name = parameter.name.replace("*", "0")  # the number of its layer
    if rounding is not None and rounding.why_exact(name, piece.dtype, piece.shape) is None:
        return rounding.format
    return WINDOW4 if isinstance(way, Packed) and why_raw(piece.dtype, piece.shape) is None else None
