"""The shapes of a model in other storage formats, computed from the shape of the unquantized model. Reads no files.

A shape is the tensors of a model and their sizes. The formats are those of `weightstream pack`, of `model.quantize`,
and those in which quantized models are published.
"""

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

FormatOf = Callable[[Parameter, TensorSlice], str | None]  # returns the format of a tensor; None: unchanged
# llama.cpp's formats if the length of rows is not a multiple of 256.
FALLBACK_FORMATS: Mapping[str, str] = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0"}
DEFAULT_FALLBACK_FORMAT = "IQ4_NL"
COMPRESSED_TENSORS, MXFP4 = "compressed-tensors", "mxfp4-pack-quantized"
GROUPED, USUAL_GROUP = {"packed-int4": 2}, 128  # bytes of a group's scale, by format; columns of a group in FORMATS


@dataclass(frozen=True, kw_only=True)
class Publication:
    """How a quantized model is published: a storage format of `PUBLISHED`, another one for experts (`experts_name`),
    columns that share a scale (`group_columns`; None: as usual for the format), and patterns of the names of modules
    that are not quantized."""

    name: str
    experts_name: str | None = None
    group_columns: int | None = None
    unconverted_modules: Sequence[str] = ()

    @staticmethod
    def from_config(quantization: Mapping[str, object]) -> "Publication":
        """Reads the `quantization_config` of a config.json. Raises ConfigError for an unknown method."""
        method, bits = quantization.get("quant_method"), quantization.get("bits", 4)
        names = {"mxfp4": EXPERTS_ONLY, "fp8": "fp8-blocks", "gptq": f"gptq-int{bits}", "awq": f"awq-int{bits}"}
        name = names.get(str(method), "")
        if method == COMPRESSED_TENSORS:  # it names its format
            name = str(quantization.get("format"))
        if name not in PUBLISHED:
            raise ConfigError(
                f"quantization_config: unknown quant_method {method!r} with {bits} bits; known: {', '.join(names)} "
                f"(4 bits; gptq also 8), and {COMPRESSED_TENSORS} with a format of plan.format"
            )
        unconverted = quantization.get("modules_to_not_convert") or quantization.get("ignore") or ()
        assert isinstance(unconverted, Sequence), "a list, as in config.json"
        groups = quantization.get("config_groups")  # of compressed-tensors: weights of the first group
        group = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
        weights = group.get("weights") if isinstance(group, Mapping) else None
        group_columns = weights.get("group_size") if isinstance(weights, Mapping) else None
        return Publication(
            name=name,
            experts_name=MXFP4 if quantization.get("expert_dtype") == "fp4" else None,
            group_columns=group_columns if isinstance(group_columns, int) else None,
            unconverted_modules=tuple(str(pattern).removeprefix("re:") for pattern in unconverted),
        )

    def row_bytes(self, name: str, num_columns: int) -> float:
        """The bytes of a row in the storage format `name`, with its share of the scales."""
        num_bytes = FORMATS[name].row_bytes(num_columns)
        if self.group_columns is None or name not in GROUPED:
            return num_bytes
        return num_bytes + GROUPED[name] * num_columns * (1 / self.group_columns - 1 / USUAL_GROUP)

    def format_of(self, parameter: Parameter) -> str | None:
        """The storage format of a parameter. None if it is not quantized: vectors, routers and, except in GGUF,
        embeddings and head."""
        name, path, shape = parameter.name, parameter.name.split("."), parameter.shape
        is_stack = (parameter.is_experts or "experts" in path) and len(shape) > 1 and not name.endswith("bias")
        is_matrix = is_stack or (len(shape) == 2 and name.endswith(".weight"))
        if not is_matrix or not ROUTERS.isdisjoint(path):
            return None
        if self.name in GGUF:  # chooses like `llama-quantize --pure`: a format whose blocks fit a row; None: 16 bits
            num_columns, fallback = parameter.shape[-1], FALLBACK_FORMATS.get(self.name, DEFAULT_FALLBACK_FORMAT)
            return next((f for f in (self.name, fallback) if num_columns % BLOCKS[f].num_numbers == 0), None)
        is_in_layer = LAYER_TENSOR.search(_mask_layer_number(name)) is not None
        module = name.removesuffix(".weight")  # patterns match as in transformers
        is_excluded = any(re.match(pattern, module) or module.endswith(pattern) for pattern in self.unconverted_modules)
        is_quantized = is_in_layer and (is_stack or self.name != EXPERTS_ONLY) and not is_excluded
        name = self.experts_name if is_stack and self.experts_name is not None else self.name
        return PUBLISHED[name] if is_quantized else None


def shape_in_format(shape: ModelShape, name: str) -> ModelShape:
    """The shape of an unquantized model in the format `name` of `plan.format`. Raises ConfigError if the format fits no
    tensor."""
    if name == PLAIN:
        return shape
    if name in PackedFormat.__members__:
        return packed_shape(shape, PackedFormat[name])
    return published_shape(shape, Publication(name=name))


def packed_shape(shape: ModelShape, packed_format: PackedFormat | Quantize) -> ModelShape:
    """The shape of an unquantized model in a format of `weightstream pack` or `model.quantize`."""
    rounding = None if packed_format is PackedFormat.lossless else Rounding(packed_format.value)

    def format_of(parameter: Parameter, piece: TensorSlice) -> str | None:
        """The format of a tensor. In a packed store, tensors that are not rounded have the lossless format."""
        name = _mask_layer_number(parameter.name)
        if rounding is not None and rounding.skip_reason(name, piece.dtype, piece.shape) is None:
            return rounding.format
        is_packed = isinstance(packed_format, PackedFormat) and skip_reason(piece.dtype, piece.shape) is None
        return WINDOW4 if is_packed else None

    return _store_parameters(shape, format_of, lambda name, num_columns: FORMATS[name].row_bytes(num_columns))


def published_shape(shape: ModelShape, publication: Publication) -> ModelShape:
    """The shape of an unquantized model as `publication` stores it. Raises ConfigError if no tensor changes."""
    published = _store_parameters(shape, lambda parameter, _: publication.format_of(parameter), publication.row_bytes)
    if published.weight_bytes == shape.weight_bytes:
        no_experts = "it stores only experts; set mxfp4-pack-quantized for all matrices of layers"
        reason = no_experts if publication.name == EXPERTS_ONLY else "no matrix has a fitting shape"
        raise ConfigError(f"plan.format={publication.name} fits no tensor of model={shape.name}: {reason}")
    return published


def _store_parameters(shape: ModelShape, format_of: FormatOf, row_bytes: Callable[[str, int], float]) -> ModelShape:
    """The shape with tensors in the formats of `format_of`, one after the other in their files. A tensor of several
    parameters is stored once, in the format for the first of them. `row_bytes`: of a format and number of columns."""
    stored, ends = dict[str, TensorSlice](), Counter[str]()
    for parameter in (parameter for stage in shape.stages for parameter in stage.parameters):
        for piece in (piece for entry in parameter.pieces for piece in entry):
            if piece.name not in stored:
                new_piece, name = piece, format_of(parameter, piece)
                if name is not None:
                    num_bytes = ceil(prod(piece.shape[:-1]) * row_bytes(name, piece.shape[-1]))
                    new_piece = replace(piece, format=name, num_bytes=num_bytes, is_interleaved=name in INTERLEAVED)
                stored[piece.name] = replace(new_piece, offset=ends[piece.file])
                ends[piece.file] += new_piece.num_bytes

    def replace_pieces(parameter: Parameter) -> Parameter:
        pieces = tuple(tuple(stored[piece.name] for piece in entry) for entry in parameter.pieces)
        return replace(parameter, pieces=pieces)

    stages = (replace(stage, parameters=tuple(map(replace_pieces, stage.parameters))) for stage in shape.stages)
    return replace(shape, stages=tuple(stages))


def _mask_layer_number(name: str) -> str:
    """Replaces `*`, which stands for any layer number, by a number, because patterns of formats expect one."""
    return name.replace("*", "0")
