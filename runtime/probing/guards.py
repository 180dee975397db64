"""What a class may do that lanes would not notice, so that its tokens would be wrong: one small question each.

Whoever loads a model asks on a copy without weights (`packed_probe.py`) and chooses other lanes, or refuses; attention
in a lane asks again with what it is handed. Each answers why not, or nothing.
"""

from collections.abc import Mapping

import torch

from ..attention.views import Reach

NO_REACH = Reach()
NO_DECODER = "its attention looks at later tokens"
UNSUPPORTED = frozenset({"position_bias", "indices", "block_indices", "sinks"})


def layer_index(module: torch.nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    assert isinstance(layer, int), f"{type(module).__name__} does not say which layer it is"
    return layer


def chunk_size(module: torch.nn.Module, layer: int) -> int | None:
    """Chunked layers are known by the config alone: transformers tells their mask, never the attention function."""
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    return getattr(config, "attention_chunk_size", None) if types and types[layer] == "chunked_attention" else None


def unsupported_argument(wishes: Mapping[str, object]) -> str:
    """What a class hands to its attention function by name and lanes do not know, in words; `""` if nothing."""
    if UNSUPPORTED.isdisjoint(wishes):
        return ""
    found = sorted(name for name in UNSUPPORTED if wishes.get(name) is not None)
    return f"its attention wants {found[0]}" if found else ""


def custom_mask(attention_mask: torch.Tensor | None) -> str:
    """Packed lanes have no mask made, and look at none."""
    return "" if attention_mask is None else "it makes attention masks of its own"


def looks_ahead(module: torch.nn.Module, is_causal: object) -> str:
    """`is_causal` is what the call says; None leaves it to the module."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return "" if causal else NO_DECODER


def changed_kv(*, are_cached: bool) -> str:
    """`are_given`: attention is handed the very keys and values that the cache gave back for this layer."""
    return "" if are_cached else "it changes keys or values behind its cache"


def hidden_window(module: torch.nn.Module, layer: int, reach: Reach) -> str:
    """A window that a layer's mask or transformers' own cache has, and its attention function is not told. One that
    no context can outgrow hides nothing."""
    if reach != NO_REACH:
        return ""
    config = getattr(module, "config", None)
    types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if window is None or (types is not None and types[layer] != "sliding_attention"):
        return ""
    if window >= getattr(config, "max_position_embeddings", window + 1):
        return ""
    return f"only its masks or its cache know of its window of {window} tokens"
