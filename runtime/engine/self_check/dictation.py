"""Sampling that chooses nothing: each sequence is told its tokens, and the logits it would choose by are kept."""

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Rows

import torch

from ..sampling.sampler import Sampler
from ..sequence import FinishReason, Sequence


class Dictation(Sampler):
    """`tokens` by request id. `heard[id]` are a sequence's rows of logits (V,), float32 on the CPU, one per token."""

    def __init__(self, tokens: Mapping[str, Rows[int]]):
        self._tokens = tokens
        self.heard: defaultdict[str, list[torch.Tensor]] = defaultdict(list)

    def draw(self, sequences: Rows[Sequence], logits_BV: torch.Tensor) -> torch.Tensor:
        """Where nobody asks, the head sees one all the same."""
        return logits_BV[: len(sequences)].float().view(torch.int32)

    def tell(self, sequences: Rows[Sequence], drawn: torch.Tensor, step: int) -> None:
        for sequence, logits_V in zip(sequences, drawn.view(torch.float32), strict=True):
            told, heard = self._tokens[sequence.request.id], self.heard[sequence.request.id]
            sequence.generated.append(told[len(heard)])
            heard.append(logits_V.clone())
            if len(heard) == len(told):
                sequence.finish = FinishReason.length
