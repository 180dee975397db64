"""Reads and writes the shapes of the named models, which are lines of JSON in jobs/data/shapes.jsonl.

A shape is the tensors of a model and their sizes. A stage is a part of the forward: embeddings, a decoder layer, or the
head. The parameters of equal stages are stored once, as a layout. Each parameter is stored as one tensor, with its
format and bytes if it is published quantized. Sizes that depend on the compute dtype are stored for each dtype. A shape
that is read has the same bytes as the model, in an imaginary file.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import NotRequired, TypeAlias, TypedDict

from runtime.config.settings import DType
from runtime.errors import ConfigError
from runtime.plan.shape.attention import DeltaRule
from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.shapes import Parameter, Stage, StageKind, TensorSlice

from .published import INTERLEAVED

ParameterKey: TypeAlias = tuple[int, str]  # index of a stage, and the name of a parameter in it

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8}
COMPUTE_DTYPES = {DType.bfloat16: "BF16", DType.float16: "F16", DType.float32: "F32"}
DTYPE_FIELDS = ("compute_dtype_bytes", "kv_layer_bytes", "state_bytes_per_sequence", "cross_kv_bytes_per_token")
STRUCTURED_FIELDS = ("name", "stages", "bounded_layers", "delta_rule", "weight_bytes")
RUN_FIELDS = (  # not stored: they depend on a run's settings, or need a loaded model
    *("compute_dtype", "kv_dtype", "kv_heads", "kv_tail_bytes_per_sequence", "state_layer_bytes"),
    *("rank_stages", "num_parts", "draft", "is_mtp_head"),
)
HOST_FIELDS = ("has_decode_kernel", "has_fused_gates", "attention_method")  # not stored: they depend on the machine
RARE_FIELDS = ("restart_tokens", "has_whole_prompts", "has_bare_experts")  # written only if true or nonzero
_OTHER_FIELDS = DTYPE_FIELDS + STRUCTURED_FIELDS + RUN_FIELDS + HOST_FIELDS
SIZES = tuple(f.name for f in fields(ModelShape) if f.name not in _OTHER_FIELDS)


class ParameterRow(TypedDict):
    """A parameter. `name`: with `*` instead of the layer number. `tied`: the key of an earlier parameter with the same
    bytes. `format` and `num_bytes`: only if it is published quantized. `rows_per_token`: of embedding
    tables, rows that a token looks up."""

    name: str
    dtype: str
    shape: list[int]
    is_experts: NotRequired[bool]
    tied: NotRequired[list[int | str]]  # a ParameterKey
    format: NotRequired[str]
    num_bytes: NotRequired[int]
    rows_per_token: NotRequired[float]


class StageRow(TypedDict):
    """`count` consecutive stages with the parameters of `layouts[layout]`."""

    count: int
    kind: str
    layout: int
    num_experts: int
    num_experts_per_token: int


class DTypeRow(TypedDict):
    """The sizes for a compute dtype. `kv_layer_bytes`: for consecutive equal layers, [number of layers, bytes per token
    in a layer]."""

    compute_dtype_bytes: int
    kv_layer_bytes: list[list[int]]
    state_bytes_per_sequence: int
    cross_kv_bytes_per_token: int


class ShapeRow(TypedDict):
    """A model. `architecture`: digest of its config. `sizes`: numeric fields of ModelShape. `dtypes`: by compute
    dtype."""

    name: str
    architecture: str
    sizes: dict[str, int]
    bounded_layers: list[int]
    delta_rule: dict[str, int] | None
    dtypes: dict[str, DTypeRow]
    stages: list[StageRow]
    layouts: list[list[ParameterRow]]


def to_row(shapes: Mapping[DType, ModelShape], architecture: str, published: ModelShape | None = None) -> ShapeRow:
    """The row of a model. `shapes`: of the unquantized model, by compute dtype. `published`: the shape as published, if
    that is quantized."""
    shape = next(iter(shapes.values()))
    pieces = [piece for stage in published.stages for p in stage.parameters for piece in p.slices] if published else []
    stored = {piece.name: piece for piece in pieces if piece.format}
    layouts: list[list[ParameterRow]] = []
    stage_keys: list[tuple[str, int, int, int]] = []
    owners: dict[frozenset[str], ParameterKey] = {}
    for stage in shape.stages:
        layout = [_parameter_row(stage.index, parameter, owners, stored) for parameter in stage.parameters]
        if layout not in layouts:
            layouts.append(layout)
        stage_keys.append((stage.kind.value, layouts.index(layout), stage.num_experts, stage.num_experts_per_token))
    delta_rule = shape.delta_rule
    return ShapeRow(
        name=shape.name,
        architecture=architecture,
        sizes={name: getattr(shape, name) for name in SIZES if name not in RARE_FIELDS or getattr(shape, name)},
        bounded_layers=sorted(shape.bounded_layers),
        delta_rule=None if delta_rule is None else {f.name: getattr(delta_rule, f.name) for f in fields(DeltaRule)},
        dtypes={
            dtype.value: DTypeRow(
                compute_dtype_bytes=dtype_shape.compute_dtype_bytes,
                kv_layer_bytes=[[len([*group]), size] for size, group in groupby(dtype_shape.kv_layer_bytes)],
                state_bytes_per_sequence=dtype_shape.state_bytes_per_sequence,
                cross_kv_bytes_per_token=dtype_shape.cross_kv_bytes_per_token,
            )
            for dtype, dtype_shape in shapes.items()
        },
        stages=[
            StageRow(
                count=len([*group]), kind=kind, layout=layout, num_experts=experts, num_experts_per_token=per_token
            )
            for (kind, layout, experts, per_token), group in groupby(stage_keys)
        ],
        layouts=layouts,
    )


def from_row(row: ShapeRow, dtype: DType, *, is_plain: bool = False) -> ModelShape:
    """The shape of a model: as published, or unquantized with `is_plain`. `dtype`: a compute dtype of the row."""
    file: dict[ParameterKey, TensorSlice] = {}  # the tensors of the imaginary file
    stages: list[Stage] = []
    for stage in row["stages"]:
        for _ in range(stage["count"]):
            number = sum(1 for other in stages if other.kind.value == stage["kind"])
            stages.append(_make_stage(len(stages), number, stage, row["layouts"][stage["layout"]], file, is_plain))
    delta_rule, sizes = row["delta_rule"], row["dtypes"][dtype.value]
    return ModelShape(
        name=row["name"],
        stages=tuple(stages),
        bounded_layers=frozenset(row["bounded_layers"]),
        delta_rule=None if delta_rule is None else DeltaRule(**delta_rule),
        kv_layer_bytes=tuple(size for count, size in sizes["kv_layer_bytes"] for _ in range(count)),
        compute_dtype_bytes=sizes["compute_dtype_bytes"],
        compute_dtype=COMPUTE_DTYPES[dtype],
        state_bytes_per_sequence=sizes["state_bytes_per_sequence"],
        cross_kv_bytes_per_token=sizes["cross_kv_bytes_per_token"],
        **row["sizes"],  # pyright: ignore[reportArgumentType] - is_packed is a bool
    )


def _parameter_row(
    stage: int, parameter: Parameter, owners: dict[frozenset[str], ParameterKey], stored: Mapping[str, TensorSlice]
) -> ParameterRow:
    """The row of a parameter. `owners`: the first parameter with each set of tensors; adds this one, unless it is tied
    to an earlier one. `stored`: tensors that are published quantized, by name."""
    dtype = parameter.slices[0].dtype
    assert parameter.num_bytes == parameter.num_elements * ITEM_BYTES[dtype], f"{parameter.name} is quantized"
    name = re.sub(r"(?<=\.)\d+(?=\.)", "*", parameter.name, count=1)
    row = ParameterRow(name=name, dtype=dtype, shape=list(parameter.shape))
    if parameter.is_experts:
        row["is_experts"] = True
    if parameter.rows_per_token:
        row["rows_per_token"] = parameter.rows_per_token
    tensors = frozenset(piece.name for piece in parameter.slices)
    if tensors in owners:
        row["tied"] = list(owners[tensors])
    else:
        owners[tensors] = (stage, name)
        formats = {stored[piece].format for piece in tensors & stored.keys()}
        if formats:
            [row["format"]] = formats
            row["num_bytes"] = sum(stored[piece].num_bytes for piece in tensors)
    return row


def _make_stage(
    index: int,
    number: int,
    row: StageRow,
    layout: Sequence[ParameterRow],
    file: dict[ParameterKey, TensorSlice],
    is_plain: bool,
) -> Stage:
    """Makes a stage. `number`: among the stages of its kind. `file`: as in `_make_parameter`."""
    kind = StageKind(row["kind"])
    return Stage(
        index=index,
        name=f"{kind.value} {number}" if kind.is_layer else kind.value,
        kind=kind,
        parameters=tuple(_make_parameter(index, parameter, file, is_plain) for parameter in layout),
        num_experts=row["num_experts"],
        num_experts_per_token=row["num_experts_per_token"],
    )


def _make_parameter(stage: int, row: ParameterRow, file: dict[ParameterKey, TensorSlice], is_plain: bool) -> Parameter:
    """Makes a parameter. Appends its tensor to `file`, unless it is tied to an earlier one."""
    name, shape = row["name"], tuple(row["shape"])
    if "tied" in row:
        owner_stage, owner = row["tied"]
        piece = file[int(owner_stage), str(owner)]
    else:
        last, plain_bytes = next(reversed(file.values()), None), prod(shape) * ITEM_BYTES[row["dtype"]]
        storage_format = "" if is_plain else row.get("format", "")
        piece = file[stage, name] = TensorSlice(
            name=f"{stage} {name}",
            file="model",
            offset=0 if last is None else last.offset + last.num_bytes,
            num_bytes=row.get("num_bytes", plain_bytes) if storage_format else plain_bytes,
            dtype=row["dtype"],
            shape=shape,
            format=storage_format,
            is_interleaved=storage_format in INTERLEAVED,
        )
    return Parameter(
        name=name,
        shape=shape,
        pieces=((piece,),),
        is_experts=row.get("is_experts", False),
        rows_per_token=row.get("rows_per_token", 0.0),
    )


SHAPES = Path(__file__).resolve().parents[1] / "data" / "shapes.jsonl"


def read_rows(path: Path = SHAPES) -> dict[str, ShapeRow]:
    """Reads the rows of the file, by model name."""
    rows: list[ShapeRow] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["name"]: row for row in rows}


def read_shape(name: str, dtype: DType, *, is_plain: bool = False) -> ModelShape:
    """The shape of a named model: as published, or unquantized with `is_plain`. `dtype`: a compute dtype other than
    auto. Raises ConfigError if jobs/data/shapes.jsonl does not have the model."""
    rows = read_rows()
    if name not in rows:
        raise ConfigError(f"model={name} has no stored sizes to plan with; models with sizes: {', '.join(rows)}")
    return shape_from_row(rows[name], dtype, is_plain=is_plain)


def shape_from_row(row: ShapeRow, dtype: DType, *, is_plain: bool) -> ModelShape:
    """The shape of a row, as from `read_shape`."""
    row_dtype = DType.float32 if dtype is DType.float32 else DType.bfloat16
    return replace(from_row(row, row_dtype, is_plain=is_plain), compute_dtype=COMPUTE_DTYPES[dtype])
