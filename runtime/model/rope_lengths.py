"""Rotary embeddings that depend on the sequence length: LongRoPE (Ding et al. 2024), with short factors up to the
pretraining length (the limit) and long factors above it.

transformers chooses the factors by the largest position of a call, which is correct for a single sequence. A lane
(micro-batch) has several sequences: here the class's code runs once with short and once with long factors, and each
token uses the result for its sequence's length. Cached keys are not changed when their sequence grows over the limit,
as in `generate`. If the class's `generate` instead drops its cache at the limit, the sequence is prefilled again.

T tokens of D numbers.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent
from transformers import DynamicCache, PreTrainedModel

from ..errors import ConfigError
from ..events import LaneRun

Embeddings = torch.Tensor | tuple[torch.Tensor, ...]  # (..., T, D) each


@dataclass(frozen=True, kw_only=True)
class RopeLengths:
    """How the keys of a sequence depend on its length."""

    restart_tokens: int | None  # the length at which `generate` drops its cache and recomputes all keys; None: never

    def token_lengths(self, positions: Iterable[int], *, num_prompt: int, num_known: int) -> list[int]:
        """Returns the length that the sequence had when `generate` last computed the key at each of `positions`.
        `num_known`: current tokens of the sequence, of which `num_prompt` are the prompt."""
        prefill_length = num_prompt  # keys at earlier positions were computed together
        if self.restart_tokens is not None and num_known >= self.restart_tokens:
            prefill_length = max(num_prompt, self.restart_tokens)
        return [max(position + 1, prefill_length) for position in positions]

    def is_restart(self, *, num_cached: int, num_known: int) -> bool:
        """True if all keys of a sequence must be recomputed, because its newest token reached `restart_tokens`."""
        return self.restart_tokens == num_known == num_cached + 1


def follow_lengths(model: PreTrainedModel) -> RopeLengths | None:
    """Makes rotary modules use `LaneRun.lengths`. Mutates `model`. Returns None if no embedding depends on the length.
    Raises ConfigError for unsupported classes."""
    limits: set[int] = set()
    for module in model.modules():
        module_limits: dict[str | None, int] = {}  # limit by layer type (None: all layers)
        rope_types: Any = getattr(module, "rope_type", None)
        rope_types = {None: rope_types} if isinstance(rope_types, str) else rope_types
        parameters: Any = getattr(getattr(module, "config", None), "rope_parameters", {})
        for layer_type, rope_type in rope_types.items() if isinstance(rope_types, dict) else ():
            if rope_type == "longrope":
                settings = parameters if layer_type is None else parameters[layer_type]
                module_limits[layer_type] = settings["original_max_position_embeddings"]
        if module_limits:
            module.forward = _length_aware(module.forward, module_limits)
            limits.update(module_limits.values())
    if not limits:
        return None
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"model.path: {type(model).__name__}: rope_type=longrope in an encoder-decoder is not supported"
        )
    return RopeLengths(restart_tokens=_restart_tokens(model, limits))


def _length_aware(forward: Callable[..., Embeddings], limits: dict[str | None, int]) -> Callable[..., Embeddings]:
    """Returns the forward of a rotary module, changed to choose factors by each token's sequence length. `limits`: by
    layer type."""

    def embed(
        x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None, **kwargs: object
    ) -> Embeddings:
        if layer_type is not None:
            kwargs["layer_type"] = layer_type

        def embed_all(positions: torch.Tensor) -> Embeddings:
            return forward(x, positions, **kwargs)

        run, limit = getcurrent(), limits.get(layer_type)
        lengths = run.lengths if isinstance(run, LaneRun) else None
        if lengths is None or limit is None:
            return embed_all(position_ids)
        if lengths.shape[-1] != position_ids.shape[-1]:
            raise ConfigError(
                f"model.path: rope_type=longrope: the class embeds {position_ids.shape[-1]} positions in a pass of "
                f"{lengths.shape[-1]} tokens, which is not supported"
            )
        is_long = lengths > limit  # (..., T), on the CPU: True for tokens with long factors
        if not is_long.any():
            return embed_all(position_ids)
        # An additional position above the limit makes the class use long factors; its embedding is dropped.
        beyond = torch.full_like(position_ids[..., :1], limit)
        out = [part[..., :-1, :] for part in _parts(embed_all(torch.cat([position_ids, beyond], -1)))]
        if not is_long.all():
            short = embed_all(position_ids.clamp(max=limit - 1))
            mask = is_long.to(position_ids.device)[..., None]
            out = [torch.where(mask, *pair) for pair in zip(out, _parts(short), strict=True)]  # pair: long, short
        return out[0] if len(out) == 1 else tuple(out)

    return embed


def _parts(embeddings: Embeddings) -> Iterator[torch.Tensor]:
    """Yields cosine and sine, or the one tensor that some classes use."""
    yield from (embeddings,) if isinstance(embeddings, torch.Tensor) else embeddings


class _FakeCache(DynamicCache):
    """An empty cache that reports `num_positions` cached positions."""

    num_positions = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_positions


def _restart_tokens(model: PreTrainedModel, limits: set[int]) -> int | None:
    """Finds the length at which `generate` drops its cache, by calling the class's `prepare_inputs_for_generation` just
    above each limit. Returns None if it never does."""
    prepare: Any = model.prepare_inputs_for_generation
    original = getattr(model.config.get_text_config(), "original_max_position_embeddings", None)
    all_limits = {*limits, original} if isinstance(original, int) else limits
    for num_known in sorted(limit + 1 for limit in all_limits):
        cache = _FakeCache(config=model.config.get_text_config())
        cache.num_positions = num_known - 1
        ids = torch.zeros(1, num_known, dtype=torch.long)
        try:
            inputs = prepare(
                ids, past_key_values=cache, attention_mask=torch.ones_like(ids), next_sequence_length=1, use_cache=True
            )
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise ConfigError(
                f"model.path: {type(model).__name__}: rope_type=longrope: cannot find out if its generate drops the "
                f"cache at {num_known:,} tokens ({error})"
            ) from error
        if inputs.get("past_key_values") is not cache:
            return num_known
    return None
