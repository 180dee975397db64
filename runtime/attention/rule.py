"""The way from the scores of a layer to the weights of its values, in plain torch operators."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rule:
    """What a layer does with its scores: `scale * q.k`, capped to +-softcap, with a sink's score (H*G) beside them."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def weights(self, scores: torch.Tensor, sinks: torch.Tensor | None, hidden: torch.Tensor | None) -> torch.Tensor:
        """Scaled scores (..., S) to weights, in place where it can; `sinks` and `hidden` broadcast over them."""
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if hidden is not None:
            scores = scores.masked_fill_(hidden, float("-inf"))
        if sinks is None:
            return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
        column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, column], -1), -1, dtype=torch.float32)[..., :-1].to(scores.dtype)
