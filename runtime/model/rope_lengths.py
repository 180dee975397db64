"""Rotary embeddings that depend on the sequence length: LongRoPE (Ding et al. 2024), with one set of factors up to the
pretraining length and another above it.

transformers picks the set by the largest position of a call, which is correct for a single sequence. A lane has many,
so each token uses its own sequence's length: the class's code runs once for short and once for long sequences. Cached
keys keep their embedding, as in `generate`. If the class drops its cache when a sequence crosses the limit, that
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
    """`restart_tokens`: the sequence length at which `generate` recomputes all keys; None if it never does."""

    restart_tokens: int | None

    def token_lengths(self, places: Iterable[int], *, num_prompt: int, num_known: int) -> list[int]:
        """The sequence length at which `generate` last computed each of `places`."""
        least = num_prompt
        if self.restart_tokens is not None and num_known >= self.restart_tokens:
            least = max(num_prompt, self.restart_tokens)
        return [max(place + 1, least) for place in places]

    def is_restart(self, *, num_cached: int, num_known: int) -> bool:
        """True if the keys of a sequence must be recomputed after its newest token."""
        return self.restart_tokens == num_known == num_cached + 1


def follow_lengths(model: PreTrainedModel) -> RopeLengths | None:
    """Makes rotary modules use `LaneRun.lengths`. Mutates `model`; returns None if nothing depends on length. Raises
    ConfigError for unsupported classes."""
    limits: set[int] = set()
    for module in model.modules():
        # By type of layer, None where a rotary module has one kind alone: the longest sequence of the short factors.
        own: dict[str | None, int] = {}
        kinds: Any = getattr(module, "rope_type", None)
        kinds = {None: kinds} if isinstance(kinds, str) else kinds
        parameters: Any = getattr(getattr(module, "config", None), "rope_parameters", {})
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else ():
            if kind == "longrope":
                of_kind = parameters if layer_type is None else parameters[layer_type]
                own[layer_type] = of_kind["original_max_position_embeddings"]
        if own:
            module.forward = _length_aware(module.forward, own)
            limits.update(own.values())
    if not limits:
        return None
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"model.path: {type(model).__name__} has rope_type=longrope behind an encoder, which lanes do not follow"
        )
    return RopeLengths(restart_tokens=_restart_tokens(model, limits))


def _length_aware(forward: Callable[..., Embeddings], limits: dict[str | None, int]) -> Callable[..., Embeddings]:
    """Wraps the forward of a rotary module for use in lanes."""

    def embed(
        x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None, **kwargs: object
    ) -> Embeddings:
        if layer_type is not None:
            kwargs["layer_type"] = layer_type

        def of(positions: torch.Tensor) -> Embeddings:
            return forward(x, positions, **kwargs)

        run, limit = getcurrent(), limits.get(layer_type)
        lengths = run.lengths if isinstance(run, LaneRun) else None
        if lengths is None or limit is None:
            return of(position_ids)
        if lengths.shape[-1] != position_ids.shape[-1]:
            raise ConfigError(
                f"model.path: rope_type=longrope embeds {position_ids.shape[-1]} positions of a pass of "
                f"{lengths.shape[-1]}, which lanes do not follow"
            )
        is_long = lengths > limit  # (..., T), on the CPU: of each token, which factors its embedding is by
        if not is_long.any():
            return of(position_ids)
        beyond = torch.full_like(position_ids[..., :1], limit)  # one more token, which makes the call a long one
        long = [each[..., :-1, :] for each in _parts(of(torch.cat([position_ids, beyond], -1)))]
        if not is_long.all():
            short = of(position_ids.clamp(max=limit - 1))
            chosen = is_long.to(position_ids.device)[..., None]
            long = [torch.where(chosen, *both) for both in zip(long, _parts(short), strict=True)]
        return long[0] if len(long) == 1 else tuple(long)

    return embed


def _parts(embeddings: Embeddings) -> Iterator[torch.Tensor]:
    yield from (embeddings,) if isinstance(embeddings, torch.Tensor) else embeddings


class _FakeCache(DynamicCache):
    """A cache that reports `num_positions`."""

    num_positions = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_positions


def _restart_tokens(model: PreTrainedModel, limits: set[int]) -> int | None:
    """The length at which the class's `generate` drops its cache, found by calling it; None if it never does."""
    prepare: Any = model.prepare_inputs_for_generation
    named = getattr(model.config.get_text_config(), "original_max_position_embeddings", None)
    for num_known in sorted({limit + 1 for limit in {*limits, *([named] if isinstance(named, int) else [])}}):
        cache = _FakeCache(config=model.config.get_text_config())
        cache.num_positions = num_known - 1
        ids = torch.zeros(1, num_known, dtype=torch.long)
        try:
            inputs = prepare(
                ids, past_key_values=cache, attention_mask=torch.ones_like(ids), next_sequence_length=1, use_cache=True
            )
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise ConfigError(
                f"model.path: {type(model).__name__} has rope_type=longrope, and does not say whether its generate "
                f"begins again at {num_known:,} tokens ({error})"
            ) from error
        if inputs.get("past_key_values") is not cache:
            return num_known
    return None
