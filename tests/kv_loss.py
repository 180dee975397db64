"""What each `kv.dtype` loses: `python -m tests.kv_loss` prints two tables in about three minutes.

Logits of random models, of every kind of attention, behind 96 tokens with transformers' cache kept by the same rule;
and the bundled trained model on stories and questions that it was not trained on, scored by this project. A model
of 1.7 M parameters with short questions says what breaks; how little a large one minds is not shown by it.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from runtime import Runtime, RuntimeConfig
from runtime.config.settings import KVConfig, KVDType
from tests.losses import FAMILIES, LogitErrors, TrainedScores, drawn_tokens, perplexity
from tests.quantized_cache import kept_logits
from tests.support import synthesize, transformers_model

LOSSY = [KVDType.bfloat16, KVDType.float8, KVDType.int8, KVDType.int4]


def logit_errors(family: str, directory: Path) -> Iterator[LogitErrors]:
    """Yields by how much logits are off for each lossy dtype."""
    model = transformers_model(synthesize(family, directory / family))
    tokens = drawn_tokens()
    exact = kept_logits(model, tokens, None)
    for dtype in LOSSY:
        yield LogitErrors.of(kept_logits(model, tokens, dtype), exact)


def trained_scores(dtype: KVDType) -> TrainedScores:
    return TrainedScores.of(Runtime(RuntimeConfig(model="tiny", kv=KVConfig(dtype=dtype))))


def main() -> None:
    logging.disable(logging.WARNING)
    names = [dtype.value for dtype in LOSSY]
    print(f"| logits off by | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    with TemporaryDirectory() as directory:
        for family in FAMILIES:
            errors = " | ".join(f"{100 * error.relative:.3g} %" for error in logit_errors(family, Path(directory)))
            print(f"| {family} | {errors} |", flush=True)
    print("\n| `model=tiny` | perplexity of stories | answers right | perplexity of answers |\n|---|---|---|---|")
    for dtype in (KVDType.auto, *LOSSY):
        scores = trained_scores(dtype)
        stories, answers, right = perplexity(scores.told), perplexity(scores.asked), scores.right.mean or 0.0
        print(f"| {dtype.value} | {stories:.4f} | {right:.1%} | {answers:.4f} |", flush=True)


if __name__ == "__main__":
    main()
