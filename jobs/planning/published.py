"""The storage formats of published models, by the names in `plan.format`, and measured errors of rounding.

Imports neither torch nor transformers, so that a plan starts quickly.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from runtime.store.gguf import BLOCKS

PLAIN = "bfloat16"  # unquantized
EXPERTS_ONLY = "mxfp4"  # of gpt-oss: only experts are quantized
GGUF = tuple(name for name, block in BLOCKS.items() if block.num_numbers > 1)
# Name in `plan.format`: storage format. Formats of compressed-tensors have their names in config.json, too. The names
# `fp8` and `int8` are not here, because they are formats of `weightstream pack`.
PUBLISHED: Mapping[str, str] = {
    EXPERTS_ONLY: "mxfp4",
    "fp8-blocks": "fp8",
    "gptq": "gptq-int4", "gptq-int4": "gptq-int4", "gptq-int8": "gptq-int8",
    "awq": "awq-int4", "awq-int4": "awq-int4",
    "nf4": "nf4", "fp4": "fp4", "llm-int8": "llm-int8",
    "pack-quantized": "packed-int4", "packed-int4": "packed-int4", "packed-int8": "packed-int8",
    "int-quantized": "int8", "float-quantized": "fp8",
    "mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4",
    "nvfp4": "nvfp4", "nvfp4-modelopt": "nvfp4-modelopt",
    **{name: name for name in GGUF},
}  # fmt: skip
INTERLEAVED = ("gptq-int4", "gptq-int8", "awq-int4")  # formats whose 32-bit words have numbers of several rows
LOSSES = Path(__file__).resolve().parents[1] / "data" / "weight_losses.jsonl"


class LossRow(TypedDict):
    """The effect of a storage format on the bundled model: relative RMS error of the weights, perplexity divided by
    that of exact weights, and fraction of correct answers (`right`)."""

    format: str
    weight_error: float
    perplexity_ratio: float
    right: float


def read_losses() -> list[LossRow]:
    return [json.loads(line) for line in LOSSES.read_text(encoding="utf-8").splitlines()]
