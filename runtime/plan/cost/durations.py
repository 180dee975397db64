"""Computes the seconds of every action of a pass, from the work of its lanes and the machine's rates. Pure functions.

A **lane** is a micro-batch; a **turn** is one lane in one stage. Stages, lanes and actions are those of
`schedule.actions`. Recurrent states are not modeled, nor is sampling other than greedy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...config.settings import ExpertPaging, KVTier
from ...resources import Resource
from ..placement.experts import NUM_STAGING_SLOTS
from ..placement.memory import FEW_ROWS, PAGE_TOKENS
from ..placement.placement import Placement
from ..schedule.actions import Action, Op
from ..schedule.walk import Walk
from ..shape.model import ModelShape
from ..shape.shapes import StageKind
from .lane_work import LaneWork
from .rates import MachineRates, StoredWork
from .simulator import Durations, ExpertReads, Links
from .work import EXPANDED_ROUND_TRIPS, LOGIT_ROUND_TRIPS, StageWork, num_cpu_experts, stage_works

LOGIT_BYTES = 4
LINKS = (Resource.disk, Resource.host_to_device, Resource.device_to_host)


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """The work of a model's stages, the same for all passes."""

    works: Sequence[StageWork]  # by stage
    first_equal: Sequence[int]  # by stage: the first stage with equal work, whose costs are reused

    @staticmethod
    def from_shape(shape: ModelShape, placement: Placement) -> "StageCosts":
        works = stage_works(shape, placement.paged, placement)
        first_stages = dict[StageWork, int]()
        first_equal = [first_stages.setdefault(work, stage) for stage, work in enumerate(works)]
        return StageCosts(works=works, first_equal=first_equal)


def make_durations(
    shape: ModelShape,
    placement: Placement,
    walk: Walk,
    lanes: Sequence[LaneWork],
    rates: MachineRates,
    stages: StageCosts | None = None,
) -> Durations:
    """Returns the durations of all actions of a pass over `walk`, the path of stages and slots.

    Attention of lanes with prompts runs on the compute device. That of lanes with single tokens runs on the CPU if the
    walk has CPU attention. `stages`: costs to reuse from another pass.
    """
    stages = stages or StageCosts.from_shape(shape, placement)
    costs = _PassCosts(shape=shape, placement=placement, walk=walk, lanes=lanes, rates=rates, stages=stages)
    kv, has_device = placement.kv, placement.has_device
    is_on_disk = bool(kv.page_bytes) and kv.tier is KVTier.nvme
    fetch_rate = rates.disk_bytes_per_second if is_on_disk else rates.link_in_bytes_per_second
    store_rate = rates.disk_bytes_per_second if is_on_disk else rates.link_out_bytes_per_second
    uses_disk_and_link = is_on_disk and has_device
    return Durations(
        read=lambda stage: stages.works[stage].num_bytes / rates.disk_bytes_per_second,
        copy=lambda stage: stages.works[stage].num_bytes / rates.weights_in_bytes_per_second,
        run=costs.per_turn(
            lambda work, lane: costs.dense(work, lane) + costs.attention(work, lane) + costs.experts(work, lane)
        ),
        pre=costs.per_turn(costs.pre_attention),
        attend=costs.per_turn(costs.attend),
        post=costs.per_turn(lambda work, lane: costs.post_attention(work, lane) + costs.experts(work, lane)),
        route=costs.per_turn(costs.route),
        experts=costs.all_experts,
        fetch=costs.kv_transfer(fetch_rate, lambda lane: lane.held_pages),
        store=costs.kv_transfer(store_rate, costs.stored_pages),
        fetch_copy=costs.kv_transfer(
            rates.link_in_bytes_per_second if uses_disk_and_link else None, lambda lane: lane.held_pages
        ),
        store_copy=costs.kv_transfer(
            rates.link_out_bytes_per_second if uses_disk_and_link else None, costs.stored_pages
        ),
        expert_reads=costs.expert_reads if placement.paged else None,
        host_attend=costs.per_turn(
            lambda work, lane: costs.attended_positions(work, lane) * work.kv_bytes / rates.host_memory_bytes_per_second
        ),
        host_shares={each.number: rates.host_shares.get(each, 0.0) for each in LINKS},
        num_pages=walk.num_pages,
        links=Links(is_on_disk, uses_disk_and_link, not has_device),
    )


@dataclass(frozen=True, kw_only=True)
class _PassCosts:
    """Seconds of one pass. Those of stages with equal work are computed once.

    A pass with CPU attention splits a turn at attention, and a pass with batched experts splits it at the experts.
    """

    shape: ModelShape
    placement: Placement
    walk: Walk
    lanes: Sequence[LaneWork]
    rates: MachineRates
    stages: StageCosts

    @cached_property
    def _expert_reads(self) -> dict[tuple[Op, int, int | None, bool], ExpertReads | None]:
        """Cached results of `expert_reads`."""
        return {}

    @cached_property
    def _batched(self) -> dict[int, float]:
        """Cached results of `all_experts`, by first equal stage."""
        return {}

    def per_turn(self, cost: Callable[[StageWork, LaneWork], float]) -> Callable[[int, int], float]:
        """Returns `cost` as a cached function of the numbers of stage and lane."""
        cache: dict[tuple[int, int], float] = {}
        first_equal = self.stages.first_equal

        def seconds(stage: int, lane: int) -> float:
            key = (first_equal[stage], lane)
            if key not in cache:
                cache[key] = cost(self.stages.works[stage], self.lanes[lane])
            return cache[key]

        return seconds

    def dense(self, work: StageWork, lane: LaneWork) -> float:
        """Returns the seconds of a turn without attention and experts. Includes cross-attention."""
        if work.kind is StageKind.head:
            logits = lane.num_rows * self.shape.vocab_size * LOGIT_BYTES * LOGIT_ROUND_TRIPS
            head_seconds = (
                self._product(lane.num_rows, work.dense_weights)
                + self._memory_seconds(logits)
                + self.rates.turn_seconds
            )
            return head_seconds + self._dequantizing(work.stored)
        seconds = self.pre_attention(work, lane) + self._after_attention(work, lane)
        if work.kind is not StageKind.layer or not lane.num_cross_positions:
            return seconds
        # Cross-attention: keys and values are projected in the first pass, and read in every pass. Their projection
        # weights belong to the layer's dense weights, and were counted for all decoder tokens, which is subtracted.
        size = self.shape.cross_kv_bytes_per_token / max(1, len(self.shape.layers))
        weights = size / self.shape.compute_dtype_bytes * self.shape.hidden_size
        attention_seconds = lane.num_cross_positions * size / self.rates.attention_bytes_per_second
        projection_seconds = self._product(lane.num_encoder_tokens, weights)
        return seconds + (attention_seconds + projection_seconds - self._product(lane.num_tokens, weights))

    def attention(self, work: StageWork, lane: LaneWork) -> float:
        """Returns the seconds of attention on the compute device."""
        if work.kind is StageKind.encoder:
            return self._prompt_attention(lane)
        if not work.kv_bytes:
            return 0.0
        # Attention of single tokens, then of prompts, then the expansion of latents (MLA).
        skips_unselected = self._skips_unselected(work, lane)
        seconds = self.attended_positions(work, lane) * work.kv_bytes / self._attention_rate
        if not lane.num_encoder_tokens and not skips_unselected:
            seconds += self._prompt_attention(lane)
        if self.shape.expanded_kv_width:
            width = self.shape.expanded_kv_width
            positions = lane.selected_positions if skips_unselected else lane.num_positions
            seconds += self._product(positions, width * work.kv_bytes / self.shape.compute_dtype_bytes)
            seconds += self._memory_seconds(positions * width * self.shape.compute_dtype_bytes * EXPANDED_ROUND_TRIPS)
        return seconds

    def experts(self, work: StageWork, lane: LaneWork) -> float:
        return self._experts(work, self._tokens_after_attention(work, lane))

    def pre_attention(self, work: StageWork, lane: LaneWork) -> float:
        """Returns the seconds before attention: products, dequantizing, and half of the turn's overhead."""
        tokens = self._tokens(work, lane)
        seconds = self._stored_product(work, tokens, work.pre_attention_weights)
        if self._skips_unselected(work, lane):  # tokens that need logits go through these weights a second time
            seconds += self._stored_product(work, lane.num_rows, work.pre_attention_weights)
        seconds += self._overhead(work, tokens) / 2 + tokens * work.table_bytes / self.rates.disk_bytes_per_second
        if not work.kind.is_layer or self._multiplies_codes:
            return seconds
        # With an area for a whole dequantized stage, lanes share the work. Paged experts are dequantized per lane.
        stored = work.stored if work.is_paged else work.stored.plus(work.stored_experts)
        return seconds + self._dequantizing(stored) / (1 if self.placement.dequantized is None else len(self.lanes))

    def _dequantizing(self, stored: StoredWork) -> float:
        return self.rates.dequantize_seconds(stored, self.shape.compute_dtype_bytes)

    @cached_property
    def _multiplies_codes(self) -> bool:
        """True if device kernels multiply quantized codes without dequantizing the weights first."""
        if not self.rates.has_code_kernels(self.shape.compute_dtype_bytes):
            return False
        num_rows = sum(lane.num_tokens for lane in self.lanes)
        return num_rows <= FEW_ROWS and not any(lane.prefill_pairs for lane in self.lanes)

    def _stored_product(self, work: StageWork, num_rows: float, num_weights: float) -> float:
        """Returns the seconds of products with `num_weights` of a layer, quantized or not, without experts."""
        stored = work.stored
        if not self._multiplies_codes or not stored.num_elements or not num_rows:
            return self._product(num_rows, num_weights)
        unquantized = max(0.0, 1 - stored.num_elements / work.dense_weights)
        codes = num_weights / work.dense_weights * self.rates.codes_seconds(stored, num_rows)
        return self._product(num_rows, unquantized * num_weights) + codes

    def attend(self, work: StageWork, lane: LaneWork) -> float:
        """Returns the seconds of attention on the CPU, including transfers from and to an accelerator."""
        if not work.kv_bytes or (lane.prefill_pairs and not self._skips_unselected(work, lane)):
            return 0.0
        shape, rates = self.shape, self.rates
        seconds = self.attended_positions(work, lane) * work.kv_bytes / rates.cpu_attention_bytes_per_second
        if not self.placement.host_layers:
            return seconds
        output_bytes = lane.num_tokens * shape.num_heads * shape.head_dim * shape.compute_dtype_bytes
        bytes_to_host = output_bytes + lane.num_tokens * work.kv_bytes
        return seconds + bytes_to_host / rates.link_out_bytes_per_second + output_bytes / rates.link_in_bytes_per_second

    def post_attention(self, work: StageWork, lane: LaneWork) -> float:
        """Returns the seconds after CPU attention. For lanes with prompts they include attention on the device."""
        seconds = self._after_attention(work, lane)
        if lane.prefill_pairs and not self._skips_unselected(work, lane):
            seconds += self.attention(work, lane)
        return seconds

    def route(self, work: StageWork, lane: LaneWork) -> float:
        """Returns the seconds before the experts: of the whole stage, or after CPU attention."""
        if self.walk.cpu_attention:
            return self.post_attention(work, lane)
        return self.dense(work, lane) + self.attention(work, lane)

    def all_experts(self, stage: int) -> float:
        """Returns the seconds of a stage's experts that run once for all lanes."""
        first = self.stages.first_equal[stage]
        if first not in self._batched:
            work = self.stages.works[stage]
            self._batched[first] = self._experts(
                work, sum(self._tokens_after_attention(work, lane) for lane in self.lanes)
            )
        return self._batched[first]

    def stored_pages(self, lane: LaneWork) -> float:
        """Returns the KV pages to store after a turn: all changed ones, or with quantized KV only the new tokens."""
        return lane.num_tokens / PAGE_TOKENS if self.placement.kv.is_quantized else lane.changed_pages

    def kv_transfer(
        self, bytes_per_second: float | None, num_pages: Callable[[LaneWork], float]
    ) -> Callable[[int, int], float]:
        """Returns a function of stage and lane: the seconds to transfer `num_pages`. They are 0 if the rate is None."""
        kv, first = self.placement.kv, self.shape.layers[0].index

        def seconds(stage: int, lane: int) -> float:
            if bytes_per_second is None:
                return 0.0
            return num_pages(self.lanes[lane]) * kv.stride_bytes(stage - first) / bytes_per_second

        return seconds

    def expert_reads(self, action: Action) -> ExpertReads | None:
        """Returns the experts that an action reads one by one; None if it reads none."""
        stage = action.stage_index
        if stage not in self.placement.paged or action.op not in (Op.run, Op.post, Op.experts):
            return None
        key = (action.op, self.stages.first_equal[stage], action.lane, stage in self.walk.in_host)
        if key not in self._expert_reads:
            self._expert_reads[key] = self._make_expert_reads(action)
        return self._expert_reads[key]

    def _make_expert_reads(self, action: Action) -> ExpertReads | None:
        """Returns the expert reads of an action; None if no token reaches the experts."""
        stage = action.stage_index
        work = self.stages.works[stage]
        lanes = self.lanes if action.lane is None else [self.lanes[action.lane]]  # None: experts of all lanes at once
        tokens = sum(self._tokens_after_attention(work, lane) for lane in lanes)
        if not tokens:
            return None
        reads_all = self.placement.paging is ExpertPaging.all
        num_on_cpu = num_cpu_experts(self.placement.cpu_share, work, tokens)
        num_read = (1 - work.kept_share) * work.num_experts
        if not reads_all:
            num_read = max(0.0, work.hits_to_read(tokens) - num_on_cpu)
        walk, rates = self.walk, self.rates
        # Seconds per expert from disk and to the device, and of the action before the experts.
        read = 0.0 if stage in walk.in_host else work.expert_bytes / rates.disk_bytes_per_second
        copy = work.expert_bytes / rates.weights_in_bytes_per_second if walk.copies else 0.0
        dense = 0.0
        if action.lane is not None:
            lane = self.lanes[action.lane]
            is_post = action.op is Op.post
            dense = self.post_attention(work, lane) if is_post else self.dense(work, lane) + self.attention(work, lane)
        # With paging=all, experts are read before the routing is known, until all slots are full.
        num_ahead = self.placement.num_expert_slots + (NUM_STAGING_SLOTS if walk.reads and walk.copies else 0)
        share, cpu_seconds = self.placement.cpu_share, 0.0
        if share is not None and num_on_cpu:  # products, and transfers in both directions
            num_hit = work.hits(tokens)
            visits_per_expert = tokens * work.num_experts_per_token / num_hit
            products = num_on_cpu * share.cost(visits_per_expert) * work.expert_bytes / rates.link_in_bytes_per_second
            vectors = num_on_cpu * visits_per_expert * self.shape.hidden_size * self.shape.compute_dtype_bytes
            round_trip = vectors / rates.link_out_bytes_per_second + vectors / rates.link_in_bytes_per_second
            # The CPU first launches the experts that the accelerator computes.
            cpu_seconds = products + round_trip + max(0.0, num_hit - num_on_cpu) * rates.hit_seconds
        return ExpertReads(
            num_experts=round(num_read),
            read_seconds=num_read * read,
            copy_seconds=num_read * copy,
            dense_seconds=dense,
            lead_seconds=min(dense, num_ahead * max(read, copy)) if reads_all else 0.0,
            cpu_seconds=cpu_seconds,
            host_seconds=num_on_cpu * work.expert_bytes / rates.host_memory_bytes_per_second,
        )

    @cached_property
    def _attention_rate(self) -> float:
        """The rate of decode attention, by the CPU if KV stays in host memory."""
        rates = self.rates
        return rates.cpu_attention_bytes_per_second if self.placement.host_layers else rates.attention_bytes_per_second

    def _tokens(self, work: StageWork, lane: LaneWork) -> int:
        is_in_encoder = self.shape.has_encoder and work.kind in (StageKind.embedding, StageKind.encoder)
        return lane.num_encoder_tokens if is_in_encoder else lane.num_tokens

    def _tokens_after_attention(self, work: StageWork, lane: LaneWork) -> int:
        """Returns the number of tokens that continue after attention."""
        return lane.num_rows if self._skips_unselected(work, lane) else self._tokens(work, lane)

    def attended_positions(self, work: StageWork, lane: LaneWork) -> int:
        """Returns the number of KV positions that single tokens attend to, in total."""
        return lane.selected_positions if self._skips_unselected(work, lane) else lane.kv_positions

    def _skips_unselected(self, work: StageWork, lane: LaneWork) -> bool:
        """True if only tokens that need logits continue after the stage has cached KV.

        With KV that stays in host memory, all tokens continue, as their keys and values are sent to the host.
        """
        return work.can_skip_unselected and lane.skips_unselected and not self.placement.host_layers

    def _after_attention(self, work: StageWork, lane: LaneWork) -> float:
        tokens = self._tokens_after_attention(work, lane)
        products = self._stored_product(work, tokens, work.dense_weights - work.pre_attention_weights)
        return products + self._overhead(work, tokens) / 2

    def _product(self, num_rows: float, num_weights: float) -> float:
        """Returns the seconds of a product; 0 without rows or weights."""
        if not num_rows or not num_weights:
            return 0.0
        return self.rates.gemm_seconds(num_rows, num_weights)

    def _memory_seconds(self, num_bytes: float) -> float:
        return num_bytes / self.rates.memory_bytes_per_second

    def _overhead(self, work: StageWork, num_tokens: int) -> float:
        """Returns the seconds of a turn outside of products, attention and experts. Includes exchanges of ranks."""
        seconds = self._memory_seconds(num_tokens * work.token_bytes) + self.rates.turn_seconds
        if not work.kind.is_layer:
            return seconds
        vectors = num_tokens * self.shape.hidden_size * self.shape.compute_dtype_bytes
        return seconds + self.rates.layer_exchange_seconds(vectors)

    def _experts(self, work: StageWork, num_tokens: float) -> float:
        """Returns the seconds of experts on the compute device, if all hit experts have equally many tokens."""
        if not work.num_experts or not work.expert_weights or not num_tokens:
            return 0.0
        hits, visits = work.hits(num_tokens), num_tokens * work.num_experts_per_token
        num_on_cpu = min(hits, num_cpu_experts(self.placement.cpu_share, work, num_tokens))
        if num_on_cpu:
            hits, visits = hits - num_on_cpu, visits * (1 - num_on_cpu / hits)
        if not hits:
            return 0.0
        if self._multiplies_codes and work.stored_experts.num_elements and not work.is_paged:
            seconds = self.rates.codes_seconds(work.stored_experts.times(hits / work.num_experts), visits / hits)
        else:
            seconds = self.rates.experts_seconds(hits, visits, work.expert_weights)
        if work.is_paged:
            # A CPU multiplies by kept experts in a group.
            num_single = hits if self.placement.has_device else work.hits_to_read(num_tokens)
            seconds += num_single * self.rates.hit_seconds + hits * self._dequantizing(work.stored_experts)
        return seconds if self.rates.has_expert_rates else seconds + self._memory_seconds(visits * work.visit_bytes)

    def _prompt_attention(self, lane: LaneWork) -> float:
        """Returns the seconds of attention of prompts."""
        flops = 4.0 * self.shape.num_heads * self.shape.head_dim * lane.prefill_pairs
        return flops / self.rates.prefill_attention_flops_per_second
