"""Beam search as transformers' `_beam_search` does it, of one prompt: which ways go on, which have ended, and whether
any could still become better. Pure, in tensors of a few numbers, so that float32 and ties come out as they do there.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

NO_SCORE = -1e9  # a score that no way has: of beams that have not begun, and of hypotheses that are not there
EarlyStopping = bool | str
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BeamRules:
    """`early_stopping`: True ends a search once `num_beams` ways have ended, False once none is likely to become
    better than they, "never" once none can. `num_ends`: tokens that end a completion."""

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_ends: int = 0

    @property
    def num_candidates(self) -> int:
        """Continuations that are looked at: so many that `num_beams` go on even if all others end."""
        return self.candidates_per_beam * self.num_beams

    @property
    def candidates_per_beam(self) -> int:
        return max(2, 1 + self.num_ends)

    def normalized(self, scores: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Sums of log-probabilities of so many tokens, as ways of unequal length are compared."""
        return scores / num_tokens**self.length_penalty

    def best_length(self, num_new: int, max_new: int) -> int:
        """The length at which a way that goes on is taken to end."""
        return max_new if self.early_stopping == "never" and self.length_penalty > 0.0 else num_new


@dataclass(frozen=True, kw_only=True)
class Hypothesis(Generic[T]):
    """A way that has ended: its score, by length, and what the caller knows it by. None: its place is still free."""

    score: float = NO_SCORE
    way: T | None = None


@dataclass(frozen=True, kw_only=True)
class BeamState(Generic[T]):
    """A search between two passes: the log-probability of each beam, the best first, and the best hypotheses."""

    scores: tuple[float, ...]
    hypotheses: tuple[Hypothesis[T], ...]

    @staticmethod
    def first(num_beams: int) -> "BeamState[T]":
        """All beams have the prompt, and only the first counts: otherwise all would go the same way."""
        return BeamState(scores=(0.0, *(NO_SCORE,) * (num_beams - 1)), hypotheses=(Hypothesis(),) * num_beams)


def advance_beams(
    rules: BeamRules,
    state: BeamState[T],
    scores: Rows[float],
    completed: Rows[T | None],
    *,
    num_new: int,
    max_new: int,
) -> tuple[BeamState[T], tuple[int, ...]]:
    """The search behind its `num_new`-th token, of at most `max_new`, and of each beam, which of the candidates it goes
    on as; none where the search is over. `scores` are those of its candidates, the best first, each the log-probability
    of all of its tokens; `ended`: those that are a whole completion, by what they are known by. Of the candidates only
    the first `num_beams` may become hypotheses."""
    scores_K = torch.tensor(scores, dtype=torch.float32)
    hits_K = torch.tensor([way is not None for way in completed])
    going_K = scores_K + hits_K.float() * NO_SCORE
    kept_B = going_K.topk(rules.num_beams).indices
    hypotheses = _merge_hypotheses(rules, state.hypotheses, scores_K, completed, num_new)
    # The best beam, if it lost nothing more, may be better than the worst hypothesis, or than a place that is free.
    worst = torch.tensor([each.score for each in hypotheses], dtype=torch.float32).min()
    bars = torch.where(torch.tensor([each.way is not None for each in hypotheses]), worst, NO_SCORE)
    best = rules.normalized(going_K[kept_B][:1], rules.best_length(num_new, max_new))
    may_improve = bool((best > bars).any())
    is_full = rules.early_stopping is True and all(each.way is not None for each in hypotheses)
    is_over = not may_improve or is_full or bool(hits_K.all())
    state = BeamState(scores=tuple(going_K[kept_B].tolist()), hypotheses=hypotheses)
    return state, () if is_over else tuple(kept_B.tolist())


def _merge_hypotheses(
    rules: BeamRules,
    hypotheses: tuple[Hypothesis[T], ...],
    scores_K: torch.Tensor,
    completed: Rows[T | None],
    num_new: int,
) -> tuple[Hypothesis[T], ...]:
    ways = [way if rank < rules.num_beams else None for rank, way in enumerate(completed)]
    normalized_K = rules.normalized(scores_K, num_new) + torch.tensor([way is None for way in ways]) * NO_SCORE
    merged = torch.cat([torch.tensor([each.score for each in hypotheses], dtype=torch.float32), normalized_K])
    best = merged.topk(rules.num_beams)
    all_ways = [*(each.way for each in hypotheses), *ways]
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return tuple(Hypothesis(score=score, way=all_ways[place]) for score, place in pairs)
