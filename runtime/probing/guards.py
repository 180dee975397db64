"""Checks for properties of a class that would give wrong tokens in packed lanes without an error. `packed_probe.py`
runs them on a copy before loading, attention in a lane on each call. Each returns the reason against packed lanes,
or ""."""

from collections.abc import Mapping

import torch

from ..attention.views import Reach

NO_REACH = Reach()
NO_DECODER = "its attention looks at later tokens"
UNSUPPORTED = frozenset({"position_bias", "indices", "block_indices", "sinks"})


def layer_index(module: torch.nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    assert isinstance(layer, int), f"{type(module).__name__} has no layer_idx"
    return layer


def chunk_size(module: torch.nn.Module, layer: int) -> int | None:
    """The chunk size of a layer's attention, from the config, as transformers passes it to masks only."""
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    return getattr(config, "attention_chunk_size", None) if types and types[layer] == "chunked_attention" else None


def unsupported_argument(arguments: Mapping[str, object]) -> str:
    """Finds an attention argument that lanes do not support."""
    if UNSUPPORTED.isdisjoint(arguments):
        return ""
    names = sorted(name for name in UNSUPPORTED if arguments.get(name) is not None)
    return f"its attention wants {names[0]}" if names else ""


def custom_mask(attention_mask: torch.Tensor | None) -> str:
    """Refuses masks: packed lanes build none and read none."""
    return "" if attention_mask is None else "it makes attention masks of its own"


def looks_ahead(module: torch.nn.Module, is_causal: object) -> str:
    """Refuses attention to later tokens. `is_causal` is the call's argument; None defers to the module."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return "" if causal else NO_DECODER


def changed_kv(*, are_cached: bool) -> str:
    """Refuses KV that differ from the cache. `are_cached`: attention got the tensors that the cache returned."""
    return "" if are_cached else "it changes keys or values behind its cache"


def hidden_window(module: torch.nn.Module, layer: int, reach: Reach) -> str:
    """Refuses a window below the context that masks or transformers' cache apply, but attention does not get."""
    if reach != NO_REACH:
        return ""
    config = getattr(module, "config", None)
    types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if window is None or (types is not None and types[layer] != "sliding_attention"):
        return ""
    if window >= getattr(config, "max_position_embeddings", window + 1):
        return ""
    return f"only its masks or its cache know of its window of {window} tokens"
