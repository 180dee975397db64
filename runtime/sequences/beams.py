"""The beam search of one prompt, as in transformers' `_beam_search`, without model and sequences. A hypothesis is a
finished beam. Computes in float32 tensors, so that rounding and ties equal those of transformers.
Shapes: B beams, K candidates (beams with one more token)."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

NO_SCORE = -1e9  # score of beams that have not begun, and of missing hypotheses
EarlyStopping = bool | str
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BeamRules:
    """Settings of a beam search. `early_stopping` ends the search: True as soon as there are `num_beams` hypotheses,
    False when no beam is likely to become better than these, "never" when no beam can. `num_ends`: number of EOS
    tokens."""

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_ends: int = 0

    @property
    def num_candidates(self) -> int:
        """Number of candidates per step, enough that `num_beams` of them do not end with an EOS token."""
        return self.candidates_per_beam * self.num_beams

    @property
    def candidates_per_beam(self) -> int:
        return max(2, 1 + self.num_ends)

    def normalize(self, scores: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Normalizes cumulative log-probabilities by length, to compare beams of unequal length."""
        return scores / num_tokens**self.length_penalty

    def best_length(self, num_new: int, max_new: int) -> int:
        """The length for which to normalize the score of a running beam, as an estimate of its final score."""
        return max_new if self.early_stopping == "never" and self.length_penalty > 0.0 else num_new


@dataclass(frozen=True, kw_only=True)
class Hypothesis(Generic[T]):
    """A finished beam, with its score normalized by length. `way`: its tokens, in a type of the caller; None if there
    is no hypothesis yet. Checkpoints of runs have these field names."""

    score: float = NO_SCORE
    way: T | None = None


@dataclass(frozen=True, kw_only=True)
class BeamState(Generic[T]):
    """State of a search: the cumulative log-probabilities (scores) of its beams, best first, and its best
    hypotheses."""

    scores: tuple[float, ...]
    hypotheses: tuple[Hypothesis[T], ...]

    @staticmethod
    def initial(num_beams: int) -> "BeamState[T]":
        # Only one beam has begun: all have the same prompt, and would continue with the same tokens.
        scores = (0.0, *(NO_SCORE,) * (num_beams - 1))
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
    """Advances a search to `num_new` of at most `max_new` tokens. Returns the new state, and for each beam the index of
    the candidate that it continues. The indices are empty if the search is over.

    `scores`: cumulative log-probabilities of the candidates, best first. `completed`: for each candidate, the caller's
    result (`Hypothesis.way`) if it is a whole completion, else None. Only the first `num_beams` candidates may become
    hypotheses."""
    scores_K = torch.tensor(scores, dtype=torch.float32)
    is_completed_K = torch.tensor([completion is not None for completion in completed])
    running_K = scores_K + is_completed_K.float() * NO_SCORE
    continued_B = running_K.topk(rules.num_beams).indices
    hypotheses = _merge_hypotheses(rules, state.hypotheses, scores_K, completed, num_new)
    # The search continues while the best beam may become better than the worst hypothesis, or hypotheses are missing.
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
    """Returns the best `num_beams` of the hypotheses and of the completed candidates."""
    eligible = [completion if rank < rules.num_beams else None for rank, completion in enumerate(completed)]
    normalized_K = rules.normalize(scores_K, num_new) + torch.tensor([way is None for way in eligible]) * NO_SCORE
    merged = torch.cat([torch.tensor([each.score for each in hypotheses], dtype=torch.float32), normalized_K])
    best = merged.topk(rules.num_beams)
    completions = [*(each.way for each in hypotheses), *eligible]
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return tuple(Hypothesis(score=score, way=completions[index]) for score, index in pairs)
