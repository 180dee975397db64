"""Log-probabilities of generated tokens under the raw distribution of the model: log-softmax in float32 of the logits
as they leave the head, before any processor, temperature or cut. transformers calls these logits `output_logits`.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Of one generated token: its own log-probability, and the likeliest tokens in its place, likeliest first."""

    own: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


def written_logprobs(logits_BV: torch.Tensor, tokens_B: torch.Tensor, num_top: int) -> torch.Tensor:
    """Of each row's chosen token and of the likeliest ones, as `read_logprobs` reads them: int32 (B,
    num_written(num_top)), so that one transfer brings them to the host. `logits_BV` is float32."""
    logprobs_BV = torch.log_softmax(logits_BV, -1)
    own_B1 = logprobs_BV.gather(-1, tokens_B[:, None])
    top = logprobs_BV.topk(num_top, -1)
    return torch.cat([own_B1.view(torch.int32), top.indices.int(), top.values.view(torch.int32)], 1)


def num_written(num_top: int) -> int:
    """Numbers of a row."""
    return 1 + 2 * num_top


def read_logprobs(numbers: torch.Tensor) -> list[TokenLogprobs]:
    """One for each row."""
    num_top = numbers.shape[1] // 2
    values = numbers.contiguous().view(torch.float32)
    own, top_ids, top = values[:, 0], numbers[:, 1 : 1 + num_top], values[:, 1 + num_top :]
    return [
        TokenLogprobs(own=o, top_ids=tuple(ids), top=tuple(likely))
        for o, ids, likely in zip(own.tolist(), top_ids.tolist(), top.tolist(), strict=True)
    ]
