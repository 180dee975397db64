"""Results of requests that do not generate: scores (log-probabilities) of target tokens, and vectors (pooled hidden
states or class logits).

A pass computes a chunk of the tokens of each sequence. Results are packed into int32 tensors, copied to the host
together, and then recorded in the sequences. Scoring and pooling targets have the same interface: `positions` in the
pass, `rows` of these to read, `owners` (the sequence of each of `rows`), and `sequences` (that of each result).
Shapes: N positions of a pass, E scores, D features, V vocabulary."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows  # `Sequence` is a running request
from dataclasses import dataclass

import numpy as np
import torch

from ..attention.upload import upload
from ..config.settings import Pooling
from ..model.head import class_logits, hidden_states
from .sequence import Encoding, FinishReason, Sequence, TokenScore, packed_width, unpack_logprobs

SLICE_BYTES = 4 * 2**20  # of float32 logits per slice
STATUS_WIDTH = 2  # columns: greedy token id, whether the logits are finite


@dataclass(frozen=True, kw_only=True)
class ScoringTargets:
    """The tokens that a pass scores. `positions`: the tokens of the pass whose logits are needed. The other fields have
    one entry per score, which is a result: `rows` (index into `positions`), `tokens` (the target token) and
    `sequences`."""

    positions: Rows[int]
    rows: Rows[int]
    tokens: Rows[int]
    sequences: Rows[Sequence]

    @property
    def owners(self) -> Rows[Sequence]:
        return self.sequences  # each of `rows` gives one result

    @staticmethod
    def from_sequences(parts: Iterable[tuple[Sequence, int, Rows[tuple[int, ...]]]]) -> "ScoringTargets":
        """Makes the targets. `parts`: (sequence, its first position in the pass, target tokens of this and each
        following position)."""
        positions = list[int]()
        scores = list[tuple[int, int, Sequence]]()
        for sequence, first, targets in parts:
            for position, tokens in enumerate(targets, first):
                scores += [(len(positions), token, sequence) for token in tokens]
                positions.append(position)
        rows, tokens, sequences = zip(*scores, strict=True) if scores else ((), (), ())
        return ScoringTargets(positions=positions, rows=rows, tokens=tokens, sequences=sequences)


class TokenScorer:
    """Computes the scores of target tokens from the logits, slice by slice. `num_top`: number of top log-probabilities
    per target."""

    def __init__(self, targets: ScoringTargets, num_top: int, device: torch.device):
        self._targets, self._num_top, self._device = targets, num_top, device
        self._parts: list[torch.Tensor] = []
        self._num_done = 0  # number of targets that are scored

    def add(self, begin: int, logits_NV: torch.Tensor) -> None:
        """Adds the logits of `positions[begin : begin + len(logits_NV)]`. Calls must be in order of `begin`."""
        num_rows = max(1, SLICE_BYTES // (4 * logits_NV.shape[-1]))
        for start in range(0, len(logits_NV), num_rows):
            part = logits_NV[start : start + num_rows].float()
            first, rows, tokens = begin + start, list[int](), list[int]()  # `rows`: within `part`
            # Take the next targets, which are ordered by row, while their rows are in this part.
            while self._num_done < len(self._targets.rows) and self._targets.rows[self._num_done] < first + len(part):
                rows.append(self._targets.rows[self._num_done] - first)
                tokens.append(self._targets.tokens[self._num_done])
                self._num_done += 1
            self._parts.append(self._pack_scores(part, upload(rows, self._device), upload(tokens, self._device)))

    @property
    def packed_scores(self) -> torch.Tensor:
        """The packed scores for `record_scores`, int32 (scores, numbers), on the logits' device."""
        width = STATUS_WIDTH + packed_width(self._num_top)
        empty = torch.empty(0, width, dtype=torch.int32, device=self._device)
        return torch.cat([empty, *self._parts])

    def _pack_scores(self, logits_NV: torch.Tensor, rows_E: torch.Tensor, tokens_E: torch.Tensor) -> torch.Tensor:
        """Packs the scores of `tokens_E` with the logits `rows_E`: status columns, then those of `pack_logprobs`."""
        is_finite_N = logits_NV.abs().amax(-1) < torch.inf
        status_N2 = torch.stack([logits_NV.argmax(-1).int(), is_finite_N.int()], 1)
        logprobs_NV = torch.log_softmax(logits_NV, -1)
        own_E1, top = logprobs_NV[rows_E, tokens_E][:, None], logprobs_NV.topk(self._num_top, -1)
        packed_top = torch.cat([top.indices.int(), top.values.view(torch.int32)], 1)
        return torch.cat([status_N2[rows_E], own_E1.view(torch.int32), packed_top[rows_E]], 1)


def record_scores(sequences: Rows[Sequence], numbers: torch.Tensor, step: int) -> int:
    """Appends the score in each row of `numbers` (see `TokenScorer.packed_scores`) to its sequence, and finishes
    sequences that have all scores. A sequence with non-finite logits fails. Returns the number of valid scores.
    `step`: number of the pass, for messages."""
    num_valid = 0
    logprobs = unpack_logprobs(numbers[:, STATUS_WIDTH:])
    rows = zip(sequences, numbers[:, :STATUS_WIDTH].tolist(), logprobs, strict=True)
    for sequence, (greedy_id, is_finite), token in rows:
        if sequence.finish is FinishReason.error:
            continue
        if not is_finite:
            sequence.is_broken = True
            sequence.fail(f"the model gave NaN or infinite logits at scored token {len(sequence.scores)} (pass {step})")
            continue
        num_valid += 1
        sequence.scores.append(TokenScore(own=token.own, top_ids=token.top_ids, top=token.top, greedy_id=greedy_id))
        if len(sequence.scores) == sequence.request.num_scores:
            sequence.finish = FinishReason.length
    return num_valid


SMALLEST_NORM = 1e-12  # vectors are divided by their norm, but at least by this, as in `torch.nn.functional.normalize`


@dataclass(frozen=True, kw_only=True)
class PoolingTargets:
    """The hidden states that a pass pools. `positions`: tokens of the pass; `owners`: the sequence of each. A result is
    what a sequence's positions give together. `sequences`: of each result, so the distinct owners in the same order;
    `counts`: number of positions of each."""

    positions: Rows[int]
    owners: Rows[Sequence]
    sequences: Rows[Sequence]
    counts: Rows[int]

    @property
    def rows(self) -> range:
        return range(len(self.positions))

    @staticmethod
    def from_sequences(parts: Iterable[tuple[Sequence, int, Rows[tuple[int, ...]]]]) -> "PoolingTargets":
        """Makes the targets. `parts`: see `ScoringTargets.from_sequences`; the target tokens are ignored."""
        pooled = [(sequence, first, len(each)) for sequence, first, each in parts if each]
        return PoolingTargets(
            positions=[first + offset for _, first, count in pooled for offset in range(count)],
            owners=[sequence for sequence, _, count in pooled for _ in range(count)],
            sequences=[sequence for sequence, _, _ in pooled],
            counts=[count for _, _, count in pooled],
        )

    def pool(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Computes what these hidden states contribute to each sequence's vector, float32 (sequences, D)."""
        parts = hidden_ND.split(list(self.counts))
        return torch.stack([_partial_vector(s, part) for s, part in zip(self.sequences, parts, strict=True)])


def _partial_vector(sequence: Sequence, hidden_ND: torch.Tensor) -> torch.Tensor:
    """What a chunk of hidden states contributes to the vector of its prompt. Contributions are summed; the chunks of a
    prompt come in order."""
    encoding = _encoding(sequence)
    if encoding.pooling is Pooling.mean:
        return hidden_ND.float().sum(0) / encoding.num_read
    if encoding.pooling is Pooling.cls:
        return hidden_ND[0].float() * (sequence.vector is None)  # zero for chunks after the first
    return hidden_ND[-1].float()  # `last`: only one hidden state is read


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
    """Runs the model's forward, and pools its hidden states or computes class logits. Returns packed vectors, int32
    (sequences, numbers), for `record_vectors`. `class_rows`: prompts per call of a classification head."""
    captured = hidden_states(forward, upload(targets.positions, device))
    assert captured.hidden_1ND is not None, "the model class did not call its decoder as a module: nothing is captured"
    if not targets.sequences:
        return torch.empty(0, 1, dtype=torch.int32, device=device)
    if not _encoding(targets.sequences[0]).has_classes:
        return targets.pool(captured.hidden_1ND[0]).view(torch.int32)
    # The classifier gets each hidden state as a prompt of one token, whose id it reads too.
    ids = upload([sequence.request.prompt_ids[-1] for sequence in targets.sequences], device)
    return class_logits(model, captured, ids, class_rows).view(torch.int32)


def record_vectors(sequences: Rows[Sequence], numbers: torch.Tensor, step: int) -> int:
    """Adds each row of `numbers` (see `read_vectors`) to its sequence's vector, and finishes sequences whose prompt is
    complete. A sequence with a non-finite row fails. Returns the number of valid rows."""
    num_valid = 0
    for sequence, row in zip(sequences, numbers.contiguous().view(torch.float32).cpu().numpy(), strict=True):
        if sequence.finish is FinishReason.error:
            continue
        if not np.isfinite(row).all():
            sequence.is_broken = True
            sequence.fail(f"the model gave NaN or infinite hidden states (pass {step})")
            continue
        num_valid += 1
        vector = row.copy() if sequence.vector is None else sequence.vector + row
        if sequence.num_cached == len(sequence.request.prompt_ids):
            if _encoding(sequence).normalize:
                vector = vector / np.float32(max(float(np.linalg.norm(vector)), SMALLEST_NORM))
            sequence.finish = FinishReason.length
        sequence.vector = vector
    return num_valid
