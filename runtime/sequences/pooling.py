"""Vectors that are read off prompts: hidden states pooled to embeddings, and logits of classes."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from ..attention.upload import upload
from ..config.settings import Pooling
from ..model.head import class_logits, hidden_states
from .sequence import Encoding, FinishReason, Sequence, Vector

SMALLEST_NORM = 1e-12  # that a vector is divided by, as in torch's own `normalize`


@dataclass(frozen=True, kw_only=True)
class Picked:
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
    def of(parts: Iterable[tuple[Sequence, int, Rows[tuple[int, ...]]]]) -> "Picked":
        """`parts` as in `Given.of`."""
        known = [(sequence, first, len(each)) for sequence, first, each in parts if each]
        return Picked(
            places=[first + place for _, first, count in known for place in range(count)],
            owners=[sequence for sequence, _, count in known for _ in range(count)],
            sequences=[sequence for sequence, _, _ in known],
            counts=[count for _, _, count in known],
        )

    def pooled(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """What each sequence's states add to its vector, float32 (sequences, D)."""
        parts = hidden_ND.split(list(self.counts))
        return torch.stack([_share(s, part) for s, part in zip(self.sequences, parts, strict=True)])


def _share(sequence: Sequence, hidden_ND: torch.Tensor) -> torch.Tensor:
    """The part of a prompt's vector that is made of these states, which come in order: of all of them, or of the
    prompt's first or last, if that is among them."""
    encoding = _encoding(sequence)
    if encoding.pooling is Pooling.mean:
        return hidden_ND.float().sum(0) / encoding.num_read
    is_first = sequence.vector is None
    if encoding.pooling is Pooling.cls:
        return hidden_ND[0].float() * is_first
    return hidden_ND[-1].float()


def _encoding(sequence: Sequence) -> Encoding:
    encoding = sequence.request.encoding
    assert encoding is not None, "its prompt is read"
    return encoding


def read_vectors(
    model: torch.nn.Module, picked: Picked, forward: Callable[[], object], device: torch.device, class_rows: int
) -> torch.Tensor:
    """Runs the model; what `tell` wants to know, int32 (sequences, numbers). `class_rows`: prompts whose classes are
    asked for at a time."""
    slices = hidden_states(forward, upload(picked.places, device))
    assert slices.hidden_1ND is not None, "a class has reached its layers by another way than all its modules"
    if not picked.sequences:
        return torch.empty(0, 1, dtype=torch.int32, device=device)
    if not _encoding(picked.sequences[0]).has_classes:
        return picked.pooled(slices.hidden_1ND[0]).view(torch.int32)
    ids = upload([sequence.request.prompt_ids[-1] for sequence in picked.sequences], device)
    return class_logits(model, slices, ids, class_rows).view(torch.int32)


def tell(sequences: Rows[Sequence], numbers: torch.Tensor, step: int) -> int:
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
        is_read = sequence.num_cached == len(sequence.request.prompt_ids)
        sequence.vector = _finished(_encoding(sequence), vector) if is_read else vector
        if is_read:
            sequence.finish = FinishReason.length
    return num_good


def _finished(encoding: Encoding, vector: Vector) -> Vector:
    if not encoding.normalize:
        return vector
    return vector / np.float32(max(float(np.linalg.norm(vector)), SMALLEST_NORM))
