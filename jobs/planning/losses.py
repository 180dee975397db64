"""What was measured of rounding the bundled model's weights: jobs/data/weight_losses.jsonl, as `tests/weight_loss.py`
wrote it. It stands alone since a sweep must not load transformers, as the table of formats does.
"""

import json
from pathlib import Path
from typing import TypedDict

LOSSES = Path(__file__).resolve().parents[1] / "data" / "weight_losses.jsonl"


class LossRow(TypedDict):
    """What rounding to a storage format does to the bundled model: the relative RMS error of its weights, the
    perplexity of stories as a multiple of the exact one, and the share of answers that are right."""

    format: str
    weight_error: float
    perplexity_ratio: float
    right: float


def read_losses() -> list[LossRow]:
    return [json.loads(line) for line in LOSSES.read_text(encoding="utf-8").splitlines()]
