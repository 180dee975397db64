"""Models whose rotary embeddings change where a sequence is longer than what they were trained for first."""

from pathlib import Path

from runtime.model.families import FAMILIES, Family
from tests.support import PROMPT_LENGTHS, Reference

NUM_NEW_TOKENS = 9
LIMIT = 11  # of PROMPT_LENGTHS two are longer, one is as long, three cross it while decoding, one stays below
assert sorted(PROMPT_LENGTHS) == [3, 5, 8, 9, 11, 17, 30]

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 7.0],
    "original_max_position_embeddings": LIMIT,
}
LONG_SHAPES: dict[str, dict[str, object]] = {
    "phi-3": {"original_max_position_embeddings": LIMIT, "rope_parameters": LONG_ROPE},
    "phi-moe": {
        "original_max_position_embeddings": LIMIT,
        "rope_parameters": {**LONG_ROPE, "short_mscale": 1.1, "long_mscale": 1.4},
    },
    "llama": {"rope_parameters": {**LONG_ROPE, "attention_factor": 1.3}},
}


def long_rope_reference(family: str, home: Path) -> Reference:
    row = FAMILIES[family]
    long = Family(name=f"{family}, long", model_type=row.model_type, overrides={**row.overrides, **LONG_SHAPES[family]})
    return Reference.shared(long, home / "families" / long.name, NUM_NEW_TOKENS)
