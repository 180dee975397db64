"""The sizes of the named models, which come with the project: a line each in jobs/data/shapes.jsonl."""

import json
from pathlib import Path

from runtime.config import DType
from runtime.errors import ConfigError
from runtime.plan.shape.model import ModelShape

from .shape_row import ShapeRow, from_row

SHAPES = Path(__file__).resolve().parents[1] / "data" / "shapes.jsonl"


def read_rows(path: Path = SHAPES) -> dict[str, ShapeRow]:
    """By name of the model."""
    rows: list[ShapeRow] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["name"]: row for row in rows}


def read_shape(name: str, dtype: DType) -> ModelShape:
    """As planned with in compute `dtype`, not auto. Raises ConfigError for a model without a line."""
    rows = read_rows()
    if name not in rows:
        raise ConfigError(f"model={name} has no sizes to plan with; these have: {', '.join(rows)}")
    return from_row(rows[name], DType.float32 if dtype is DType.float32 else DType.bfloat16)
