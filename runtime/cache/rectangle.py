"""KV cache of one padded lane: transformers' own cache, its plain layers with their memory reserved at once.

A cache that grows by concatenation copies all of itself for every token. Sliding windows and recurrent states are
bounded, so their layers stay transformers' own.
"""

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ..stream.device import ComputeDevice


class ReservedLayer(DynamicLayer):
    """Keys and values (B, H, S, D), views of memory that has room for `capacity` positions."""

    def __init__(self, capacity: int, device: ComputeDevice):
        super().__init__()
        self._capacity, self._compute = capacity, device
        self._length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._all_keys, self._all_values = self._reserve(key_states), self._reserve(value_states)
        self.is_initialized = True

    def _reserve(self, like: torch.Tensor) -> torch.Tensor:
        shape = (like.shape[0], like.shape[1], self._capacity, like.shape[3])
        num_elements = torch.Size(shape).numel()
        return self._compute.zeros(num_elements * like.itemsize).view(like.dtype)[:num_elements].view(shape)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both with all that is cached, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, self._length = self._length, self._length + key_states.shape[-2]
        self._all_keys[:, :, begin : self._length] = key_states
        self._all_values[:, :, begin : self._length] = value_states
        return self._look()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keeps the rows of `beam_idx`, which must ascend: each moves up to its new place, nothing is allocated."""
        if not self.is_initialized:
            return
        kept = beam_idx.tolist()
        assert kept == sorted(set(kept)), f"rows {kept} do not ascend"
        for tensor in (self._all_keys, self._all_values):
            for new, old in enumerate(kept):
                if new != old:
                    tensor[new, :, : self._length] = tensor[old, :, : self._length]
        self._all_keys, self._all_values = self._all_keys[: len(kept)], self._all_values[: len(kept)]
        self._look()

    def _look(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = self._all_keys[:, :, : self._length], self._all_values[:, :, : self._length]
        return self.keys, self.values


def rectangle_cache(config: PreTrainedConfig, capacity: int, device: ComputeDevice) -> DynamicCache:
    """`capacity`: positions of the longest sequence, padding included."""
    cache = DynamicCache(config=config)
    cache.layers = [ReservedLayer(capacity, device) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cross_rectangle_cache(
    config: PreTrainedConfig, num_decoded: int, num_encoded: int, device: ComputeDevice
) -> EncoderDecoderCache:
    """`config` is the decoder's own. What it keeps of the encoder's positions is written once, by the first pass."""
    own, cross = (rectangle_cache(config, capacity, device) for capacity in (num_decoded, num_encoded))
    return EncoderDecoderCache(own, cross)
