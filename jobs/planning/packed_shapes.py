"""Shapes of a model as `weightstream pack` stores it, as `model.quantize` loads it, or as others publish it. Sizes
follow from the storage formats; no file is read."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from runtime.config.settings import Quantize
from runtime.errors import ConfigError
from runtime.formats.kinds.rounded import LAYER_TENSOR, ROUTERS, Rounding
from runtime.formats.kinds.window4 import skip_reason
from runtime.formats.registry import FORMATS
from runtime.linear.window4_rows import WINDOW4
from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.shapes import Parameter, TensorSlice
from runtime.store.gguf import BLOCKS

from .config import PackedFormat
from .published import EXPERTS_ONLY, GGUF, INTERLEAVED, PLAIN, PUBLISHED

FormatOf = Callable[[Parameter, TensorSlice], str | None]  # of a tensor; None where it stays as it is
# What llama.cpp takes for rows that its blocks of 256 numbers do not divide.
FALLBACK_FORMATS: Mapping[str, str] = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0"}
DEFAULT_FALLBACK_FORMAT = "IQ4_NL"


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A storage format of `PUBLISHED`, and the modules that stay unquantized, as patterns of
    `modules_to_not_convert`."""

    name: str
    unconverted_modules: Sequence[str] = ()

    @staticmethod
    def from_config(quantization: Mapping[str, object]) -> "Publication":
        """Reads the `quantization_config` of a config.json. Raises ConfigError for a method without a known
        format."""
        method, bits = quantization.get("quant_method"), quantization.get("bits", 4)
        names = {"mxfp4": EXPERTS_ONLY, "fp8": "fp8-blocks", "gptq": f"gptq-int{bits}", "awq": f"awq-int{bits}"}
        name = names.get(str(method), "")
        if name not in PUBLISHED:
            raise ConfigError(
                f"quantization_config of an architecture: quant_method {method!r} with {bits} bits is none of "
                f"{', '.join(names)} (bits 4; of gptq 8, too)"
            )
        left_out = quantization.get("modules_to_not_convert") or ()
        assert isinstance(left_out, Sequence), "a list, as in config.json"
        return Publication(name=name, unconverted_modules=tuple(map(str, left_out)))

    def format_of(self, parameter: Parameter) -> str | None:
        """The storage format of a parameter; None if it is not quantized: vectors, routers, and, except with GGUF,
        embeddings and head."""
        name, path, shape = parameter.name, parameter.name.split("."), parameter.shape
        is_stack = (parameter.is_experts or "experts" in path) and len(shape) > 1 and not name.endswith("bias")
        is_matrix = is_stack or (len(shape) == 2 and name.endswith(".weight"))
        if not is_matrix or not ROUTERS.isdisjoint(path):
            return None
        if self.name in GGUF:  # as `llama-quantize --pure` chooses it for rows of so many numbers; None for 16 bits
            num_columns, other = parameter.shape[-1], FALLBACK_FORMATS.get(self.name, DEFAULT_FALLBACK_FORMAT)
            return next((each for each in (self.name, other) if not num_columns % BLOCKS[each].num_numbers), None)
        is_stored = LAYER_TENSOR.search(_mask_layer_number(name)) is not None and (
            is_stack or self.name != EXPERTS_ONLY
        )
        module = name.removesuffix(".weight")  # patterns mean what they mean to transformers
        is_left_out = any(re.match(pattern, module) or module.endswith(pattern) for pattern in self.unconverted_modules)
        return PUBLISHED[self.name] if is_stored and not is_left_out else None


def shape_in_format(shape: ModelShape, name: str) -> ModelShape:
    """The shape of a model of unquantized weights in the format that `plan.format` names. Raises ConfigError if no
    tensor can be stored in it."""
    if name == PLAIN:
        return shape
    if name in PackedFormat.__members__:
        return packed_shape(shape, PackedFormat[name])
    return published_shape(shape, Publication(name=name))


def packed_shape(shape: ModelShape, packed_format: PackedFormat | Quantize) -> ModelShape:
    """The shape with weights in a format of `weightstream pack` or `model.quantize`."""
    rounding = None if packed_format is PackedFormat.lossless else Rounding(packed_format.value)

    def format_of(parameter: Parameter, piece: TensorSlice) -> str | None:
        """The format of a tensor; a packed store holds tensors that are not rounded losslessly."""
        name = _mask_layer_number(parameter.name)
        if rounding is not None and rounding.skip_reason(name, piece.dtype, piece.shape) is None:
            return rounding.format
        return (
            WINDOW4
            if isinstance(packed_format, PackedFormat) and skip_reason(piece.dtype, piece.shape) is None
            else None
        )

    return _store_parameters(shape, format_of)


def published_shape(shape: ModelShape, publication: Publication) -> ModelShape:
    """The shape of a model of unquantized weights with weights as `publication` stores them. Raises ConfigError if no
    tensor changes."""
    found = _store_parameters(shape, lambda parameter, _: publication.format_of(parameter))
    if found.weight_bytes == shape.weight_bytes:
        no_experts = "it stores experts alone; mxfp4-pack-quantized stores all matrices of layers"
        why = no_experts if publication.name == EXPERTS_ONLY else "none of its matrices fits it"
        raise ConfigError(f"plan.format={publication.name}: no tensor of model={shape.name} is stored so: {why}")
    return found


def _store_parameters(shape: ModelShape, format_of: FormatOf) -> ModelShape:
    """Lays tensors out one after the other. A tensor shared by several parameters is stored once, in the format of
    the first."""
    stored, ends = dict[str, TensorSlice](), Counter[str]()
    for parameter in (parameter for stage in shape.stages for parameter in stage.parameters):
        for piece in (piece for entry in parameter.pieces for piece in entry):
            if piece.name not in stored:
                found, name = piece, format_of(parameter, piece)
                if name is not None:
                    num_bytes = ceil(prod(piece.shape[:-1]) * FORMATS[name].row_bytes(piece.shape[-1]))
                    found = replace(piece, format=name, num_bytes=num_bytes, is_interleaved=name in INTERLEAVED)
                stored[piece.name] = replace(found, offset=ends[piece.file])
                ends[piece.file] += found.num_bytes

    def restored(parameter: Parameter) -> Parameter:
        pieces = tuple(tuple(stored[piece.name] for piece in entry) for entry in parameter.pieces)
        return replace(parameter, pieces=pieces)

    stages = (replace(stage, parameters=tuple(map(restored, stage.parameters))) for stage in shape.stages)
    return replace(shape, stages=tuple(stages))


def _mask_layer_number(name: str) -> str:
    """The name of a parameter with `*` for the number of its layer."""
    return name.replace("*", "0")
