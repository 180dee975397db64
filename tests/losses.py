"""What rounding costs a model: by how much its logits are off, and what the bundled trained model then gets right."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from jobs.grading.intervals import Estimate, estimate, estimate_groups
from runtime import Runtime
from runtime.library.scoring import Scored
from scripts.train_tiny.corpus import evaluation_examples
from scripts.train_tiny.stories import STORY
from scripts.train_tiny.tasks import TASKS

FAMILIES = ["llama", "mistral", "mixtral", "gemma-2", "gemma-3", "gpt-oss", "qwen3-moe", "phi-3"]
NUM_TOKENS, NUM_ASKED, NUM_TEXTS, SEED = 96, 60, 200, 7


class LogitErrors(NamedTuple):
    """How far logits are off: their norm, and the largest, as shares of the deviation of those that are right; and the
    divergence of what they say of the next token, in nats, on average."""

    relative: float
    largest: float
    divergence: float

    @staticmethod
    def of(found: torch.Tensor, right: torch.Tensor) -> "LogitErrors":
        """Both (T, V)."""
        spread, error = right - right.mean(-1, keepdim=True), found - right
        divergence = torch.nn.functional.kl_div(
            found.log_softmax(-1), right.log_softmax(-1), reduction="batchmean", log_target=True
        )
        return LogitErrors(
            relative=float(error.norm() / spread.norm()),
            largest=float(error.abs().max() / spread.std()),
            divergence=float(divergence),
        )


def drawn_tokens() -> list[int]:
    """The tokens that logits of random models are compared behind."""
    return torch.randint(5, 600, (NUM_TOKENS,), generator=torch.Generator().manual_seed(SEED)).tolist()


@dataclass(frozen=True, kw_only=True)
class TrainedScores:
    """What the trained model makes of stories and questions that it was not trained on."""

    told: Sequence[Scored]
    asked: Sequence[Scored]

    @staticmethod
    def of(runtime: Runtime) -> "TrainedScores":
        told, asked = (runtime.score([*pairs]) for pairs in (examples([STORY], NUM_TEXTS), examples(TASKS, NUM_ASKED)))
        return TrainedScores(told=told, asked=asked)

    @property
    def right(self) -> Estimate:
        """The share of questions whose whole answer is the likeliest."""
        return estimate([float(each.is_greedy) for each in self.asked])

    def beyond(self, exact: "TrainedScores") -> Estimate:
        """How much more the perplexity of stories is than `exact` has it."""
        return nats_beyond(self.told, exact.told)


def perplexity(scored: Sequence[Scored]) -> float:
    """The perplexity per token of the targets."""
    return math.exp(-sum(each.logprob for each in scored) / sum(each.num_target_tokens for each in scored))


def nats_beyond(scores: Sequence[Scored], exact: Sequence[Scored]) -> Estimate:
    """By how much the logarithm of the perplexity is more than that of `exact`, from what each target comes to."""
    pairs = zip(scores, exact, strict=True)
    return estimate_groups(
        [
            [right - wrong for wrong, right in zip(mine.token_logprobs, theirs.token_logprobs, strict=True)]
            for mine, theirs in pairs
        ]
    )


def examples(tasks: Iterable[str], count: int) -> Iterator[tuple[str, str]]:
    """Yields prompts and answers as the model was trained on, but none that it has seen where there are others."""
    for task in tasks:
        for example in evaluation_examples(task, count, SEED):
            yield example.prompt, example.answer
