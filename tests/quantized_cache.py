"""transformers' cache with keys and values as `kv.dtype` keeps them: what lossy tokens are held against."""

import torch
from transformers import DynamicCache, PreTrainedModel

from runtime.config.settings import KVDType

PAGE = 16


def _kept_values(x: torch.Tensor, dim: int, kv_dtype: KVDType) -> torch.Tensor:
    """Numbers that share a scale lie along `dim`."""
    low, high = x.min(dim, keepdim=True).values, x.max(dim, keepdim=True).values
    if kv_dtype is KVDType.int8:
        scale = (x.abs().max(dim, keepdim=True).values / 127).bfloat16().float()
        return torch.round(x / scale).clamp(-127, 127) * scale
    scale = torch.maximum((high - low) / 15, x.abs().max(dim, keepdim=True).values / 127).bfloat16().float()
    zero = torch.round(low / scale).clamp(-128, 127)
    return (zero + (torch.round(x / scale) - zero).clamp(0, 15)) * scale


class KeptCache(DynamicCache):
    """What each token sees, if tokens come one by one: its own page as computed, those before it as they are kept; with
    a dtype that rounds each number by itself all of them so."""

    def __init__(self, kv_dtype: KVDType):
        super().__init__()
        self._kv_dtype = kv_dtype

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):  # pyright: ignore
        k, v = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if not self._kv_dtype.is_quantized:
            stored = torch.bfloat16 if self._kv_dtype is KVDType.bfloat16 else torch.float8_e4m3fn
            return k.to(stored).float(), v.to(stored).float()
        whole = (k.shape[2] - 1) // PAGE * PAGE
        k_pages, v_pages = (x[:, :, :whole].unflatten(2, (-1, PAGE)) if whole else x[:, :, :0] for x in (k, v))
        if whole:
            k_pages = _kept_values(k_pages, 3, self._kv_dtype).flatten(2, 3)
            v_pages = _kept_values(v_pages, 4, self._kv_dtype).flatten(2, 3)
        return torch.cat([k_pages, k[:, :, whole:]], 2), torch.cat([v_pages, v[:, :, whole:]], 2)


@torch.inference_mode()
def kept_logits(model: PreTrainedModel, tokens: list[int], kv_dtype: KVDType | None) -> torch.Tensor:
    """Logits behind each token (T, V), one forward pass for each; None: with transformers' cache as it is."""
    cache = DynamicCache() if kv_dtype is None else KeptCache(kv_dtype)
    rows = [
        model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0] for token in tokens
    ]
    return torch.cat(rows)


@torch.inference_mode()
def kept_greedy(model: PreTrainedModel, prompt: list[int], num_new: int, kv_dtype: KVDType) -> tuple[list[int], float]:
    """Greedy tokens, and by how much the closest of them was the choice."""
    cache, tokens, margin = KeptCache(kv_dtype), list[int](), float("inf")
    pending = list(prompt)
    while len(tokens) < num_new:
        for token in pending:
            logits = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
        best = logits.topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        pending = [int(best.indices[0])]
        tokens += pending
    return tokens, margin
