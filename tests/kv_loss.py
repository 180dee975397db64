"""What each `kv.dtype` loses: `python -m tests.kv_loss` prints two tables in about three minutes.

Logits of random models, of every kind of attention, behind 96 tokens with transformers' cache kept by the same rule;
and the bundled trained model on stories and questions that it was not trained on, scored by this project. A model
of 1.7 M parameters with short questions says what breaks; how little a large one minds is not shown by it.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from jobs.training.corpus import asked_examples
from jobs.training.stories import STORY
from jobs.training.tasks import TASKS
from runtime import Runtime, RuntimeConfig
from runtime.config import KVConfig, KVDType
from runtime.scoring import Scored
from tests.quantized_cache import kept_logits
from tests.support import synthesize, transformers_model

LOSSY = [KVDType.bfloat16, KVDType.float8, KVDType.int8, KVDType.int4]
FAMILIES = ["llama", "mistral", "mixtral", "gemma-2", "gemma-3", "gpt-oss", "qwen3-moe", "phi-3"]
NUM_TOKENS, NUM_ASKED, NUM_TEXTS, SEED = 96, 60, 200, 7


def logit_errors(family: str, directory: Path) -> Iterator[float]:
    """Yields for each lossy dtype the norm of what logits are off by, as a share of their deviation."""
    model = transformers_model(synthesize(family, directory / family))
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(5, 600, (NUM_TOKENS,), generator=generator).tolist()
    exact = kept_logits(model, tokens, None)
    spread = (exact - exact.mean(-1, keepdim=True)).norm()
    for dtype in LOSSY:
        yield float((kept_logits(model, tokens, dtype) - exact).norm() / spread)


def trained_losses(dtype: KVDType) -> tuple[float, float, float]:
    """Perplexity per token of stories' continuations, the share of questions whose whole answer is the likeliest, and
    the perplexity per token of the answers."""
    runtime = Runtime(RuntimeConfig(model="tiny", kv=KVConfig(dtype=dtype)))
    told, asked = (runtime.score(list(pairs)) for pairs in (examples([STORY], NUM_TEXTS), examples(TASKS, NUM_ASKED)))
    return _perplexity(told), sum(each.is_greedy for each in asked) / len(asked), _perplexity(asked)


def _perplexity(scored: Sequence[Scored]) -> float:
    return math.exp(-sum(each.logprob for each in scored) / sum(each.num_target_tokens for each in scored))


def examples(tasks: Iterable[str], count: int) -> Iterator[tuple[str, str]]:
    """Yields prompts and answers as the model was trained on, but none that it has seen where there are others."""
    for task in tasks:
        for example in asked_examples(task, count, SEED):
            yield example.prompt, example.answer


def main() -> None:
    logging.disable(logging.WARNING)
    names = [dtype.value for dtype in LOSSY]
    print(f"| logits off by | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    with TemporaryDirectory() as directory:
        for family in FAMILIES:
            errors = " | ".join(f"{100 * error:.3g} %" for error in logit_errors(family, Path(directory)))
            print(f"| {family} | {errors} |", flush=True)
    print("\n| `model=tiny` | perplexity of stories | answers right | perplexity of answers |\n|---|---|---|---|")
    for dtype in (KVDType.auto, *LOSSY):
        of_texts, right, of_answers = trained_losses(dtype)
        print(f"| {dtype.value} | {of_texts:.4f} | {right:.1%} | {of_answers:.4f} |", flush=True)


if __name__ == "__main__":
    main()
