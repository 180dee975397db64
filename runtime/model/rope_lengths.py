"""Rotary embeddings that depend on the sequence length: LongRoPE (Ding et al. 2024), with one set of factors up to the
pretraining length and another above it.

transformers picks the set by the largest position of a call, which is correct for a single sequence. A lane has many:
each token uses its own sequence's length, and the class's code runs once for short and once for long sequences. Cached
keys keep their embedding, as in `generate`. If `generate` drops its cache when a sequence crosses the limit, that
sequence is prefilled again.
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
    """The effect of sequence lengths. `restart_tokens`: the length at which `generate` recomputes all keys; None if it
    never does."""

    restart_tokens: int | None

    def token_lengths(self, positions: Iterable[int], *, num_prompt: int, num_known: int) -> list[int]:
        """Sequence lengths at which `generate` last computed the keys at `positions`."""
        least = num_prompt
        if self.restart_tokens is not None and num_known >= self.restart_tokens:
            least = max(num_prompt, self.restart_tokens)
        return [max(position + 1, least) for position in positions]

    def is_restart(self, *, num_cached: int, num_known: int) -> bool:
        """True if the keys of a sequence must be recomputed after its newest token."""
        return self.restart_tokens == num_known == num_cached + 1


def follow_lengths(model: PreTrainedModel) -> RopeLengths | None:
    """Makes rotary modules use `LaneRun.lengths`. Mutates `model`; returns None if nothing depends on length. Raises
    ConfigError for unsupported classes."""
    limits: set[int] = set()
    for module in model.modules():
        own: dict[str | None, int] = {}  # longest sequence with short factors, by layer type (None: one for all layers)
        kinds: Any = getattr(module, "rope_type", None)
        kinds = {None: kinds} if isinstance(kinds, str) else kinds
        parameters: Any = getattr(getattr(module, "config", None), "rope_parameters", {})
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else ():
            if kind == "longrope":
                settings = parameters if layer_type is None else parameters[layer_type]
                own[layer_type] = settings["original_max_position_embeddings"]
        if own:
            module.forward = _length_aware(module.forward, own)
            limits.update(own.values())
    if not limits:
        return None
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"model.path: {type(model).__name__}: rope_type=longrope in an encoder-decoder is not supported"
        )
    return RopeLengths(restart_tokens=_restart_tokens(model, limits))


def _length_aware(forward: Callable[..., Embeddings], limits: dict[str | None, int]) -> Callable[..., Embeddings]:
    """Wraps the forward of a rotary module for use in lanes."""

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
        beyond = torch.full_like(position_ids[..., :1], limit)  # one more token makes the class use long factors
        out = [part[..., :-1, :] for part in _parts(embed_all(torch.cat([position_ids, beyond], -1)))]
        if not is_long.all():
            short = embed_all(position_ids.clamp(max=limit - 1))
            mask = is_long.to(position_ids.device)[..., None]
            out = [torch.where(mask, *both) for both in zip(out, _parts(short), strict=True)]
        return out[0] if len(out) == 1 else tuple(out)

    return embed


def _parts(embeddings: Embeddings) -> Iterator[torch.Tensor]:
    yield from (embeddings,) if isinstance(embeddings, torch.Tensor) else embeddings


class _FakeCache(DynamicCache):
    """A cache that reports `num_positions`."""

    num_positions = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_positions


def _restart_tokens(model: PreTrainedModel, limits: set[int]) -> int | None:
    """Finds the length at which the class's `generate` drops its cache, by calling it; None if it never does."""
    prepare: Any = model.prepare_inputs_for_generation
    original = getattr(model.config.get_text_config(), "original_max_position_embeddings", None)
    for num_known in sorted({limit + 1 for limit in {*limits, *([original] if isinstance(original, int) else [])}}):
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
