"""Shapes of the named models: a line of JSON each in jobs/data/shapes.jsonl. Equal stages are stored once, and sizes
that depend on the compute dtype for each dtype. Each parameter is written as one tensor, with storage format and
bytes if it is published quantized. Shapes read back have the same bytes, laid out in a file that does not exist."""

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

Place: TypeAlias = tuple[int, str]  # a stage, and the name of one of its parameters

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
COMPUTE_DTYPES = {DType.bfloat16: "BF16", DType.float16: "F16", DType.float32: "F32"}
OF_DTYPE = ("compute_dtype_bytes", "kv_layer_bytes", "state_bytes_per_sequence", "cross_kv_bytes_per_token")
STRUCTURED = ("name", "stages", "bounded_layers", "delta_rule", "weight_bytes")
# What follows from a run's settings, and what is known of a model alone that was looked at.
OF_RUN = (
    "compute_dtype",
    "kv_dtype",
    "kv_heads",
    "kv_tail_bytes_per_sequence",
    "state_layer_bytes",
    "own",
    "num_parts",
)
HOST_FIELDS = ("has_decode_kernel", "has_fused_gates", "attention_method")  # what follows from where a model runs
RARE_FIELDS = ("restart_tokens", "has_whole_prompts", "has_bare_experts")  # in a line only where a model has them
SIZES = tuple(f.name for f in fields(ModelShape) if f.name not in OF_DTYPE + STRUCTURED + OF_RUN + HOST_FIELDS)


class ParameterRow(TypedDict):
    """`name` has `*` for the number of a layer. `tied`: the parameter that holds its bytes. `format` and `num_bytes`:
    only if published in a storage format."""

    name: str
    dtype: str
    shape: list[int]
    is_experts: NotRequired[bool]
    tied: NotRequired[list[int | str]]  # a Place
    format: NotRequired[str]
    num_bytes: NotRequired[int]


class StageRow(TypedDict):
    """`count` consecutive stages with the parameters of `layouts[layout]`."""

    count: int
    kind: str
    layout: int
    num_experts: int
    num_experts_per_token: int


class DTypeRow(TypedDict):
    """`kv_layer_bytes`: runs of layers, as [number of layers, bytes]."""

    compute_dtype_bytes: int
    kv_layer_bytes: list[list[int]]
    state_bytes_per_sequence: int
    cross_kv_bytes_per_token: int


class ShapeRow(TypedDict):
    """`architecture`: digest of the architecture. `sizes`: numeric fields of ModelShape."""

    name: str
    architecture: str
    sizes: dict[str, int]
    bounded_layers: list[int]
    delta_rule: dict[str, int] | None
    dtypes: dict[str, DTypeRow]
    stages: list[StageRow]
    layouts: list[list[ParameterRow]]


def to_row(shapes: Mapping[DType, ModelShape], architecture: str, published: ModelShape | None = None) -> ShapeRow:
    """The line of a model. `shapes`, of unquantized weights, differ only in compute dtype. `published`: the shape in
    the formats that the model is published in, if any."""
    shape = next(iter(shapes.values()))
    pieces = [piece for stage in published.stages for p in stage.parameters for piece in p.slices] if published else []
    stored = {piece.name: piece for piece in pieces if piece.format}
    layouts: list[list[ParameterRow]] = []
    numbers: list[tuple[str, int, int, int]] = []
    places: dict[frozenset[str], Place] = {}
    for stage in shape.stages:
        layout = [_parameter_row(stage.index, parameter, places, stored) for parameter in stage.parameters]
        if layout not in layouts:
            layouts.append(layout)
        numbers.append((stage.kind.value, layouts.index(layout), stage.num_experts, stage.num_experts_per_token))
    delta_rule = shape.delta_rule
    return ShapeRow(
        name=shape.name,
        architecture=architecture,
        sizes={name: getattr(shape, name) for name in SIZES if name not in RARE_FIELDS or getattr(shape, name)},
        bounded_layers=sorted(shape.bounded_layers),
        delta_rule=None if delta_rule is None else {f.name: getattr(delta_rule, f.name) for f in fields(DeltaRule)},
        dtypes={
            dtype.value: DTypeRow(
                compute_dtype_bytes=each.compute_dtype_bytes,
                kv_layer_bytes=[[len([*group]), size] for size, group in groupby(each.kv_layer_bytes)],
                state_bytes_per_sequence=each.state_bytes_per_sequence,
                cross_kv_bytes_per_token=each.cross_kv_bytes_per_token,
            )
            for dtype, each in shapes.items()
        },
        stages=[
            StageRow(
                count=len([*group]), kind=kind, layout=layout, num_experts=experts, num_experts_per_token=per_token
            )
            for (kind, layout, experts, per_token), group in groupby(numbers)
        ],
        layouts=layouts,
    )


def from_row(row: ShapeRow, dtype: DType, *, is_plain: bool = False) -> ModelShape:
    """The shape of a model as published, or with `is_plain` with numbers of the row's dtypes. `dtype`: one of the
    row's."""
    file: dict[Place, TensorSlice] = {}
    stages: list[Stage] = []
    for stage in row["stages"]:
        for _ in range(stage["count"]):
            turn = sum(1 for other in stages if other.kind.value == stage["kind"])
            stages.append(_stage(len(stages), turn, stage, row["layouts"][stage["layout"]], file, is_plain))
    delta_rule, of_dtype = row["delta_rule"], row["dtypes"][dtype.value]
    return ModelShape(
        name=row["name"],
        stages=tuple(stages),
        bounded_layers=frozenset(row["bounded_layers"]),
        delta_rule=None if delta_rule is None else DeltaRule(**delta_rule),
        kv_layer_bytes=tuple(size for count, size in of_dtype["kv_layer_bytes"] for _ in range(count)),
        compute_dtype_bytes=of_dtype["compute_dtype_bytes"],
        compute_dtype=COMPUTE_DTYPES[dtype],
        state_bytes_per_sequence=of_dtype["state_bytes_per_sequence"],
        cross_kv_bytes_per_token=of_dtype["cross_kv_bytes_per_token"],
        **row["sizes"],  # pyright: ignore[reportArgumentType] - is_packed is a bool
    )


def _parameter_row(
    stage: int, parameter: Parameter, places: dict[frozenset[str], Place], stored: Mapping[str, TensorSlice]
) -> ParameterRow:
    dtype = parameter.slices[0].dtype
    assert parameter.num_bytes == parameter.num_elements * ITEM_BYTES[dtype], f"{parameter.name} is quantised"
    name = re.sub(r"(?<=\.)\d+(?=\.)", "*", parameter.name, count=1)
    row = ParameterRow(name=name, dtype=dtype, shape=list(parameter.shape))
    if parameter.is_experts:
        row["is_experts"] = True
    tensors = frozenset(piece.name for piece in parameter.slices)
    if tensors in places:
        row["tied"] = list(places[tensors])
    else:
        places[tensors] = (stage, name)
        formats = {stored[piece].format for piece in tensors & stored.keys()}
        if formats:
            [row["format"]] = formats
            row["num_bytes"] = sum(stored[piece].num_bytes for piece in tensors)
    return row


def _stage(
    index: int,
    turn: int,
    row: StageRow,
    layout: Sequence[ParameterRow],
    file: dict[Place, TensorSlice],
    is_plain: bool,
) -> Stage:
    kind = StageKind(row["kind"])
    return Stage(
        index=index,
        name=f"{kind.value} {turn}" if kind.is_layer else kind.value,
        kind=kind,
        parameters=tuple(_parameter(index, parameter, file, is_plain) for parameter in layout),
        num_experts=row["num_experts"],
        num_experts_per_token=row["num_experts_per_token"],
    )


def _parameter(stage: int, row: ParameterRow, file: dict[Place, TensorSlice], is_plain: bool) -> Parameter:
    """Appends the tensors to `file`, which is mutated."""
    name, shape = row["name"], tuple(row["shape"])
    if "tied" in row:
        number, other = row["tied"]
        piece = file[int(number), str(other)]
    else:
        last, plain_bytes = next(reversed(file.values()), None), prod(shape) * ITEM_BYTES[row["dtype"]]
        name_of_format = "" if is_plain else row.get("format", "")
        piece = file[stage, name] = TensorSlice(
            name=f"{stage} {name}",
            file="model",
            offset=0 if last is None else last.offset + last.num_bytes,
            num_bytes=row.get("num_bytes", plain_bytes) if name_of_format else plain_bytes,
            dtype=row["dtype"],
            shape=shape,
            format=name_of_format,
            is_interleaved=name_of_format in INTERLEAVED,
        )
    return Parameter(name=name, shape=shape, pieces=((piece,),), is_experts=row.get("is_experts", False))


SHAPES = Path(__file__).resolve().parents[1] / "data" / "shapes.jsonl"


def read_rows(path: Path = SHAPES) -> dict[str, ShapeRow]:
    """The rows of the file, by model name."""
    rows: list[ShapeRow] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["name"]: row for row in rows}


def read_shape(name: str, dtype: DType, *, is_plain: bool = False) -> ModelShape:
    """The shape of a model in a compute dtype other than auto: as published, or with `is_plain` with 16-bit weights.
    Raises ConfigError for a model without a line."""
    rows = read_rows()
    if name not in rows:
        raise ConfigError(f"model={name} has no sizes to plan with; these have: {', '.join(rows)}")
    of_dtype = DType.float32 if dtype is DType.float32 else DType.bfloat16
    return replace(from_row(rows[name], of_dtype, is_plain=is_plain), compute_dtype=COMPUTE_DTYPES[dtype])
