"""Log-probabilities of generated tokens under the raw distribution of the model: log-softmax in float32 of the logits
as they leave the head, before any processor, temperature or cut. transformers calls these logits `output_logits`.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Of one generated token: its own log-probability, and the likeliest tokens in its place, likeliest first."""

    own: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


def token_logprobs(logits_BV: torch.Tensor, tokens: Rows[int], num_top: int) -> list[TokenLogprobs]:
    """One for each row, whose chosen token is in `tokens`. `logits_BV` is float32."""
    logprobs_BV = torch.log_softmax(logits_BV, -1)
    chosen_B1 = torch.tensor(tokens, device=logits_BV.device)[:, None]
    own = logprobs_BV.gather(-1, chosen_B1)[:, 0].tolist()
    top = logprobs_BV.topk(num_top, -1)
    return [
        TokenLogprobs(own=o, top_ids=tuple(ids), top=tuple(values))
        for o, ids, values in zip(own, top.indices.tolist(), top.values.tolist(), strict=True)
    ]
