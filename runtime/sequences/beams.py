"""The beam search of one prompt, as in transformers' `_beam_search`. Pure; in float32 tensors, so that rounding and
ties match transformers."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

NO_SCORE = -1e9  # marks beams that have not begun and free hypothesis slots
EarlyStopping = bool | str
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BeamRules:
    """Settings of a beam search. `early_stopping`: True ends it once `num_beams` hypotheses exist, False once no beam
    is likely to beat them, "never" once none can. `num_ends`: number of EOS tokens."""

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_ends: int = 0

    @property
    def num_candidates(self) -> int:
        """Candidates per step: enough for `num_beams` to continue if all others end."""
        return self.candidates_per_beam * self.num_beams

    @property
    def candidates_per_beam(self) -> int:
        return max(2, 1 + self.num_ends)

    def normalize(self, scores: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Cumulative log-probabilities normalized by length, to compare beams of unequal length."""
        return scores / num_tokens**self.length_penalty

    def best_length(self, num_new: int, max_new: int) -> int:
        """The length at which to estimate the final score of a running beam."""
        return max_new if self.early_stopping == "never" and self.length_penalty > 0.0 else num_new


@dataclass(frozen=True, kw_only=True)
class Hypothesis(Generic[T]):
    """A finished beam with its normalized score. `way`: the caller's result; None if the slot is free."""

    score: float = NO_SCORE
    way: T | None = None


@dataclass(frozen=True, kw_only=True)
class BeamState(Generic[T]):
    """State of a search: cumulative log-probabilities of the beams, best first, and the best hypotheses."""

    scores: tuple[float, ...]
    hypotheses: tuple[Hypothesis[T], ...]

    @staticmethod
    def initial(num_beams: int) -> "BeamState[T]":
        scores = (0.0, *(NO_SCORE,) * (num_beams - 1))  # one beam: all hold the prompt and would continue identically
        return BeamState(scores=scores, hypotheses=(Hypothesis(),) * num_beams)


def advance_beams(
    rules: BeamRules,
    state: BeamState[T],
    scores: Rows[float],
    completed: Rows[T | None],
    *,
    num_new: int,
    max_new: int,
) -> tuple[BeamState[T], tuple[int, ...]]:
    """Advances a search to `num_new` of at most `max_new` tokens. Returns the new state and, for each beam, the index
    of the candidate that it continues; empty if the search is over. `scores`: cumulative log-probabilities of the
    candidates, best first. `completed`: the result of each candidate that is a whole completion. Only the first
    `num_beams` candidates may become hypotheses."""
    scores_K = torch.tensor(scores, dtype=torch.float32)
    is_completed_K = torch.tensor([completion is not None for completion in completed])
    running_K = scores_K + is_completed_K.float() * NO_SCORE
    continued_B = running_K.topk(rules.num_beams).indices
    hypotheses = _merge_hypotheses(rules, state.hypotheses, scores_K, completed, num_new)
    # The search continues while the best beam may beat the worst hypothesis or fill a free slot.
    worst = torch.tensor([each.score for each in hypotheses], dtype=torch.float32).min()
    thresholds = torch.where(torch.tensor([each.way is not None for each in hypotheses]), worst, NO_SCORE)
    best = rules.normalize(running_K[continued_B][:1], rules.best_length(num_new, max_new))
    may_improve = bool((best > thresholds).any())
    is_full = rules.early_stopping is True and all(each.way is not None for each in hypotheses)
    is_over = not may_improve or is_full or bool(is_completed_K.all())
    state = BeamState(scores=tuple(running_K[continued_B].tolist()), hypotheses=hypotheses)
    return state, () if is_over else tuple(continued_B.tolist())


def _merge_hypotheses(
    rules: BeamRules,
    hypotheses: tuple[Hypothesis[T], ...],
    scores_K: torch.Tensor,
    completed: Rows[T | None],
    num_new: int,
) -> tuple[Hypothesis[T], ...]:
    eligible = [completion if rank < rules.num_beams else None for rank, completion in enumerate(completed)]
    normalized_K = rules.normalize(scores_K, num_new) + torch.tensor([way is None for way in eligible]) * NO_SCORE
    merged = torch.cat([torch.tensor([each.score for each in hypotheses], dtype=torch.float32), normalized_K])
    best = merged.topk(rules.num_beams)
    completions = [*(each.way for each in hypotheses), *eligible]
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return tuple(Hypothesis(score=score, way=completions[index]) for score, index in pairs)
