"""Making jobs/data/shapes.jsonl from the architectures in `conf`, with transformers."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from jobs.planning.named import named_shapes

from ..config.settings import read_yaml
from ..config.typed import plain
from ..files.publishing import json_digest, publish, write_all
from .shape_row import ShapeRow, to_row

CONF = Path(__file__).resolve().parents[2] / "conf"


def architectures() -> dict[str, dict[str, object]]:
    """Of the models that have a name, by it."""
    paths = sorted((CONF / "architecture").glob("*.yaml"))
    return {path.stem: read_yaml(path) for path in paths if (CONF / "model" / path.name).exists()}


def architecture_digest(architecture: Mapping[str, object]) -> str:
    return json_digest(plain(architecture))[:16]


def make_row(name: str, architecture: Mapping[str, object]) -> ShapeRow:
    return to_row(named_shapes(name, architecture), architecture_digest(architecture))


def write_shapes(path: Path) -> Iterator[str]:
    """Yields each model's name once it is weighed; the file is published behind the last one. Raises OutputError."""
    lines: list[str] = []
    for name, architecture in architectures().items():
        lines.append(json.dumps(make_row(name, architecture), separators=(",", ":")) + "\n")
        yield name
    text = "".join(lines).encode()
    publish(path, lambda file: write_all(file, text), exclusive=False)
