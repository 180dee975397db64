"""Tests whether a model class works in packed lanes, by running a copy of the model once.

The copy has replacements for transformers' attention function, mask function and cache. They record what the class
passes to them, and compare masks with the reach of each layer (the positions that it attends to)."""

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from greenlet import getcurrent
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from ..attention.views import Reach
from ..events import LaneRun
from . import guards
from .empty_weights import PROBE_ERRORS, ProbeEnded, copy_on_meta, copy_with_random_values

log = logging.getLogger(__name__)

NAME = "weightstream_probe"  # of the attention implementation
NUM_TOKENS = 3
UNBOUNDED_CONTEXT = 1 << 20  # context length in tokens for configs without a limit
COPIES = (  # tried in this order until one runs: (function that makes the copy, its device)
    (copy_on_meta, "meta"),
    (copy_with_random_values, "cpu"),
    (partial(copy_with_random_values, with_experts=True), "cpu"),
)
# Arguments: batch index, head index, query positions, key positions. Returns True where a query attends to a key.
MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Mask:
    """A mask that the class asked transformers to make. `tensor`: a placeholder that is passed to layers. `function`:
    computes the mask. `size`: length of the window or chunk."""

    tensor: torch.Tensor
    function: MaskFunction
    size: int | None

    def matches(self, reach: Reach, num_positions: int) -> bool:
        """True if `reach` allows the same positions as the mask's function. Compares positions around the edges of
        windows and chunks, up to `num_positions`. Shapes: S selected positions."""
        sizes = [size for size in (reach.window, reach.chunk, self.size) if size is not None]
        edges = {position for size in sizes for position in (size - 1, size, size + 1, 2 * size + 1)}
        positions = sorted(i for i in {0, 1, 2, num_positions - 1} | edges if 0 <= i < num_positions)
        positions_S = torch.tensor(positions)
        visible_SS = self.function(0, 0, positions_S[:, None], positions_S[None, :])
        if visible_SS.is_meta:  # chunked attention reads a padding tensor, which has no values on the meta device
            return self.size == reach.chunk
        firsts_S1 = torch.tensor([reach.first(position) for position in positions])[:, None]
        expected_SS = (positions_S[None] <= positions_S[:, None]) & (positions_S[None] >= firsts_S1)
        return bool(expected_SS.eq(visible_SS).all())


@dataclass
class ProbeRecord:
    """What one test run recorded. `reason`: the first reason against packed lanes, or ""."""

    rank: int | None  # number of elements of compressed KV (MLA), None if the class has none
    masks: list[Mask] = field(default_factory=list)
    cached: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # layer -> keys, values
    attended: set[int] = field(default_factory=set)  # layers that called attention
    reason: str = ""

    def are_cached(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> bool:
        """True if `key` and `value` are the cache's tensors, or if the cache has compressed KV (MLA), from which they
        are computed."""
        tensors = self.cached.get(layer)
        return tensors is not None and (is_latent(tensors, self.rank) or (key is tensors[0] and value is tensors[1]))


class ProbeCache(Cache):
    """Behaves like the cache of a packed lane in the prefill of one sequence. Records keys and values."""

    def __init__(self, record: ProbeRecord, device: str) -> None:
        super().__init__(layers=[])
        self._record, self._device = record, device

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._record.cached[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(  # pyright: ignore[reportIncompatibleMethodOverride] - may return a tensor, as PagedKV does
        self, layer_idx: int | None = None
    ) -> int | torch.Tensor:
        return 0 if layer_idx is None else torch.zeros(NUM_TOKENS, dtype=torch.long, device=self._device)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0


def is_latent(tensors: Iterable[torch.Tensor], rank: int | None) -> bool:
    """True if a layer caches compressed KV (MLA), which has one head of `rank` numbers."""
    return rank is not None and any(t.shape[1] == 1 and t.shape[-1] == rank for t in tensors)


def latent_rank(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(), "kv_lora_rank", None)


def packed_lanes_obstacle(model: PreTrainedModel) -> str:
    """The reason why the class cannot run in packed lanes, or "". `model` is not changed.

    The first test runs on the meta device. If the class needs values, its first layers run on the CPU with random
    weights. If that fails too, the result is "", and attention checks each call of the run (`guards.py`)."""
    for make_copy, device in COPIES:
        try:
            return _run_probe(make_copy(model), device, latent_rank(model))
        except PROBE_ERRORS as error:
            log.debug("%s: no packed pass on %s (%s)", type(model).__name__, device, error)
    return ""


@torch.no_grad()
def _run_probe(probe: PreTrainedModel, device: str, rank: int | None) -> str:
    """Runs the copy `probe` in a lane. Returns the reason against packed lanes, or "". `rank`: see `ProbeRecord`."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_mask)
    probe.set_attn_implementation(NAME)
    vars(probe.config.get_text_config())["pad_token_id"] = None  # with one, some classes search the ids for padding
    record = ProbeRecord(rank)
    positions_1T = torch.arange(NUM_TOKENS, device=device)[None]

    def forward() -> None:
        with contextlib.suppress(ProbeEnded):
            probe(
                input_ids=torch.ones_like(positions_1T),
                position_ids=positions_1T,
                past_key_values=ProbeCache(record, device),
                use_cache=True,
            )

    LaneRun(forward, record).switch()
    unattended = sorted(record.cached.keys() - record.attended)
    return record.reason or (f"layer {unattended[0]} does not use transformers' attention" if unattended else "")


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    device: torch.device,
    local_size: int | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """Replaces transformers' function that makes masks: records the mask and returns a placeholder."""
    tensor = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    _current_record().masks.append(Mask(tensor=tensor, function=mask_function, size=local_size))
    return tensor


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Replaces the attention function of packed lanes (`ragged_attention`): checks its arguments, returns zeros."""
    record, layer = _current_record(), guards.layer_index(module)
    reach = Reach(sliding_window, guards.chunk_size(module, layer))
    mask = next((each for each in record.masks if each.tensor is attention_mask), None)
    num_positions = getattr(getattr(module, "config", None), "max_position_embeddings", None) or UNBOUNDED_CONTEXT
    is_known = mask is not None and mask.matches(reach, num_positions)
    reasons = (
        guards.unsupported_argument(kwargs),
        guards.looks_ahead(module, kwargs.get("is_causal")),
        guards.changed_kv(are_cached=record.are_cached(layer, key, value)),
        guards.hidden_window(module, layer, reach),
        guards.custom_mask(None if is_known else attention_mask),
    )
    record.attended.add(layer)
    record.reason = record.reason or next(filter(None, reasons), "")
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _current_record() -> ProbeRecord:
    run = getcurrent()
    record = run.cache if isinstance(run, LaneRun) else None
    assert isinstance(record, ProbeRecord), "the probe's functions were called outside of it"
    return record
