"""Layers of a padded lane's cache that other ranks compute: they hold nothing here, and are as long as if they did,
since a class makes its masks by the first layer of a kind, whoever has it.
"""

from collections.abc import Collection

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin


class PassedLayer(DynamicLayer):
    """Counts positions."""

    def __init__(self) -> None:
        super().__init__()
        self._length = 0

    def lengthen(self, num_tokens: int) -> None:
        self._length += num_tokens

    def get_seq_length(self) -> int:
        return self._length

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """All rows are as long."""


def pass_over(cache: Cache, layers: Collection[int], num_rows: int, num_tokens: int) -> None:
    """Makes `layers` longer by so many tokens of each row. Those that keep a window take a byte for each of them."""
    byte = torch.zeros(num_rows, 1, num_tokens, 1, dtype=torch.uint8) if layers else None
    for index in layers:
        layer = cache.layers[index]
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        if isinstance(layer, PassedLayer):
            layer.lengthen(num_tokens)
        elif isinstance(layer, DynamicLayer) and byte is not None:
            layer.update(byte, byte)
