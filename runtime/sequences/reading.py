"""What is read off prompts: scores of tokens that are given, log-softmax in float32 of the logits as they leave the
head; and vectors, hidden states pooled to embeddings or logits of classes.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from ..attention.upload import upload
from ..config.settings import Pooling
from ..model.head import class_logits, hidden_states
from .sequence import Encoding, FinishReason, Sequence, TokenScore, packed_width, unpack_logprobs

SLICE_BYTES = 4 * 2**20  # of float32 logits that become log-probabilities at a time
STATUS_WIDTH = 2  # the likeliest token, whether the logits are finite


@dataclass(frozen=True, kw_only=True)
class ScoringTargets:
    """The tokens that a pass scores. `places` are those of the tokens before them, among all of a hidden state;
    `rows`, `tokens` and `sequences` are of each score: which of `places` it is behind, what is scored, and for whom."""

    places: Rows[int]
    rows: Rows[int]
    tokens: Rows[int]
    sequences: Rows[Sequence]

    @property
    def owners(self) -> Rows[Sequence]:
        """Whose each of `rows` is."""
        return self.sequences

    @staticmethod
    def from_sequences(parts: Iterable[tuple[Sequence, int, Rows[tuple[int, ...]]]]) -> "ScoringTargets":
        """What `parts` say of each sequence of a pass: itself, its first place, and what is scored behind each of its
        places."""
        places = list[int]()
        scores = list[tuple[int, int, Sequence]]()
        for sequence, first, each in parts:
            for place, tokens in enumerate(each, first):
                scores += [(len(places), token, sequence) for token in tokens]
                places.append(place)
        rows, tokens, sequences = zip(*scores, strict=True) if scores else ((), (), ())
        return ScoringTargets(places=places, rows=rows, tokens=tokens, sequences=sequences)


class TokenScorer:
    """Adds up what slices of logits say of the given tokens. `num_top`: how many of the likeliest tokens are wanted in
    place of each."""

    def __init__(self, targets: ScoringTargets, num_top: int, device: torch.device):
        self._targets, self._num_top, self._device = targets, num_top, device
        self._parts: list[torch.Tensor] = []
        self._num_done = 0

    def add(self, begin: int, logits_NV: torch.Tensor) -> None:
        """`logits_NV` are of the places from `begin` on; slices come in order."""
        num_rows = max(1, SLICE_BYTES // (4 * logits_NV.shape[-1]))
        for start in range(0, len(logits_NV), num_rows):
            part = logits_NV[start : start + num_rows].float()
            first, rows, tokens = begin + start, list[int](), list[int]()
            while self._num_done < len(self._targets.rows) and self._targets.rows[self._num_done] < first + len(part):
                rows.append(self._targets.rows[self._num_done] - first)
                tokens.append(self._targets.tokens[self._num_done])
                self._num_done += 1
            self._parts.append(self._pack_scores(part, upload(rows, self._device), upload(tokens, self._device)))

    @property
    def numbers(self) -> torch.Tensor:
        """What `tell` wants to know, int32 (scores, numbers), where the logits were."""
        width = STATUS_WIDTH + packed_width(self._num_top)
        empty = torch.empty(0, width, dtype=torch.int32, device=self._device)
        return torch.cat([empty, *self._parts])

    def _pack_scores(self, logits_NV: torch.Tensor, rows_E: torch.Tensor, tokens_E: torch.Tensor) -> torch.Tensor:
        is_finite_N = logits_NV.abs().amax(-1) < torch.inf
        of_row_N2 = torch.stack([logits_NV.argmax(-1).int(), is_finite_N.int()], 1)
        logprobs_NV = torch.log_softmax(logits_NV, -1)
        own_E1, top = logprobs_NV[rows_E, tokens_E][:, None], logprobs_NV.topk(self._num_top, -1)
        of_row = torch.cat([top.indices.int(), top.values.view(torch.int32)], 1)
        return torch.cat([of_row_N2[rows_E], own_E1.view(torch.int32), of_row[rows_E]], 1)


def record_scores(sequences: Rows[Sequence], numbers: torch.Tensor, step: int) -> int:
    """Appends a score to each of `sequences`, one for each row of `numbers`, and marks those that have all of theirs.
    Mutates them; returns how many scores are good. A row without finite logits becomes an error row."""
    num_good = 0
    logprobs = unpack_logprobs(numbers[:, STATUS_WIDTH:])
    each = zip(sequences, numbers[:, :STATUS_WIDTH].tolist(), logprobs, strict=True)
    for sequence, (greedy_id, is_finite), token in each:
        if sequence.finish is FinishReason.error:
            continue
        if not is_finite:
            sequence.is_broken = True
            sequence.fail(f"the model gave NaN or infinite logits at scored token {len(sequence.scores)} (pass {step})")
            continue
        num_good += 1
        sequence.scores.append(TokenScore(own=token.own, top_ids=token.top_ids, top=token.top, greedy_id=greedy_id))
        if len(sequence.scores) == sequence.request.num_scores:
            sequence.finish = FinishReason.length
    return num_good


SMALLEST_NORM = 1e-12  # that a vector is divided by, as in torch's own `normalize`


@dataclass(frozen=True, kw_only=True)
class PoolingTargets:
    """The hidden states that a pass reads: `places` among all of them, `owners` whose each is. `counts`: how many of
    each of `sequences`, whose are side by side."""

    places: Rows[int]
    owners: Rows[Sequence]
    sequences: Rows[Sequence]
    counts: Rows[int]

    @property
    def rows(self) -> range:
        return range(len(self.places))

    @staticmethod
    def from_sequences(parts: Iterable[tuple[Sequence, int, Rows[tuple[int, ...]]]]) -> "PoolingTargets":
        """`parts` as in `Given.of`."""
        known = [(sequence, first, len(each)) for sequence, first, each in parts if each]
        return PoolingTargets(
            places=[first + place for _, first, count in known for place in range(count)],
            owners=[sequence for sequence, _, count in known for _ in range(count)],
            sequences=[sequence for sequence, _, _ in known],
            counts=[count for _, _, count in known],
        )

    def pooled(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """What each sequence's states add to its vector, float32 (sequences, D)."""
        parts = hidden_ND.split(list(self.counts))
        return torch.stack([_partial_vector(s, part) for s, part in zip(self.sequences, parts, strict=True)])


def _partial_vector(sequence: Sequence, hidden_ND: torch.Tensor) -> torch.Tensor:
    """The part of a prompt's vector that is made of these states, which come in order: of all of them, or of the
    prompt's first or last, if that is among them."""
    encoding = _encoding(sequence)
    if encoding.pooling is Pooling.mean:
        return hidden_ND.float().sum(0) / encoding.num_read
    if encoding.pooling is Pooling.cls:
        return hidden_ND[0].float() * (sequence.vector is None)
    return hidden_ND[-1].float()


def _encoding(sequence: Sequence) -> Encoding:
    encoding = sequence.request.encoding
    assert encoding is not None, "its prompt is read"
    return encoding


def read_vectors(
    model: torch.nn.Module,
    targets: PoolingTargets,
    forward: Callable[[], object],
    device: torch.device,
    class_rows: int,
) -> torch.Tensor:
    """Runs the model; what `tell` wants to know, int32 (sequences, numbers). `class_rows`: prompts whose classes are
    asked for at a time."""
    slices = hidden_states(forward, upload(targets.places, device))
    assert slices.hidden_1ND is not None, "a class has reached its layers by another way than all its modules"
    if not targets.sequences:
        return torch.empty(0, 1, dtype=torch.int32, device=device)
    if not _encoding(targets.sequences[0]).has_classes:
        return targets.pooled(slices.hidden_1ND[0]).view(torch.int32)
    ids = upload([sequence.request.prompt_ids[-1] for sequence in targets.sequences], device)
    return class_logits(model, slices, ids, class_rows).view(torch.int32)


def record_vectors(sequences: Rows[Sequence], numbers: torch.Tensor, step: int) -> int:
    """Adds to the vector of each of `sequences`, one for each row of `numbers`, and finishes those whose prompts have
    been read. Mutates them; returns how many are good. A row that is not finite becomes an error row."""
    num_good = 0
    for sequence, row in zip(sequences, numbers.contiguous().view(torch.float32).cpu().numpy(), strict=True):
        if sequence.finish is FinishReason.error:
            continue
        if not np.isfinite(row).all():
            sequence.is_broken = True
            sequence.fail(f"the model gave NaN or infinite hidden states (pass {step})")
            continue
        num_good += 1
        vector = row.copy() if sequence.vector is None else sequence.vector + row
        if sequence.num_cached == len(sequence.request.prompt_ids):
            if _encoding(sequence).normalize:
                vector = vector / np.float32(max(float(np.linalg.norm(vector)), SMALLEST_NORM))
            sequence.finish = FinishReason.length
        sequence.vector = vector
    return num_good
