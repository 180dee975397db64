"""Checks for properties of a model class that would give wrong tokens in packed lanes without an error.

Each check returns the reason why packed lanes cannot be used, or "". `packed_probe.py` runs the checks once on a copy
of the model before loading. The attention function of packed lanes runs them in each call. The reach of a layer is the
positions that it attends to: all earlier ones, a sliding window, or a chunk."""

from collections.abc import Mapping

import torch

from ..attention.views import Reach

NO_REACH = Reach()  # all earlier positions
NO_DECODER = "its attention looks at later tokens"
UNSUPPORTED = frozenset({"position_bias", "indices", "block_indices", "sinks"})  # arguments of attention functions


def layer_index(module: torch.nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    assert isinstance(layer, int), f"{type(module).__name__} has no layer_idx"
    return layer


def chunk_size(module: torch.nn.Module, layer: int) -> int | None:
    """The chunk size of a layer's attention, or None. It is read from the config, since transformers passes it only to
    the functions that make masks."""
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    return getattr(config, "attention_chunk_size", None) if types and types[layer] == "chunked_attention" else None


def unsupported_argument(arguments: Mapping[str, object]) -> str:
    """Refuses attention arguments that packed lanes do not support."""
    if UNSUPPORTED.isdisjoint(arguments):
        return ""
    names = sorted(name for name in UNSUPPORTED if arguments.get(name) is not None)
    return f"its attention wants {names[0]}" if names else ""


def custom_mask(attention_mask: torch.Tensor | None) -> str:
    """Refuses any mask: attention in packed lanes does not use masks."""
    return "" if attention_mask is None else "it makes attention masks of its own"


def looks_ahead(module: torch.nn.Module, is_causal: object) -> str:
    """Refuses attention to later tokens. `is_causal`: the argument of the attention call; None means the attribute of
    the module."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return "" if causal else NO_DECODER


def changed_kv(*, are_cached: bool) -> str:
    """Refuses classes that change keys or values after the cache returned them. `are_cached`: attention got the
    cache's own tensors."""
    return "" if are_cached else "it changes keys or values behind its cache"


def hidden_window(module: torch.nn.Module, layer: int, reach: Reach) -> str:
    """Refuses a sliding window, shorter than the context, that the class applies by masks or its cache, but does not
    pass to attention. `reach`: from the arguments of attention."""
    if reach != NO_REACH:
        return ""
    config = getattr(module, "config", None)
    types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if window is None or (types is not None and types[layer] != "sliding_attention"):
        return ""
    if window >= getattr(config, "max_position_embeddings", window + 1):
        return ""
    return f"only its masks or its cache know of its window of {window} tokens"
