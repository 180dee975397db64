"""All policies of a search, as arrays of equal length. Element i of every array belongs to policy i.

A **lane** is a micro-batch of a block, the sequences that decode together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...config.orders import PLAIN, Order
from ...config.settings import Attention, FeedForward, KVTier, PrefetchConfig, RuntimeConfig, Tier
from ..placement.feedforward import cpu_experts_obstacle
from ..placement.placer import KV_FRACTIONS, cpu_attention_obstacle
from ..placement.walks import cpu_attends, num_weight_slots
from ..shape.model import ModelShape
from ..shape.numbers import Bools, Floats
from .policy import Policy

# Candidate micro-batch sizes, and candidate numbers of micro-batches per block.
MICRO_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024)
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32)
NUM_RESIDENT_STEPS = 12  # candidate numbers of resident layers: 0/12, 1/12 ... 12/12 of all layers
ORDERS = tuple(Order)
ATTENTIONS = tuple(Attention)


@dataclass(frozen=True, kw_only=True)
class PolicyGrid:
    """The policies of a search. Each divides the requests into equal blocks.

    `micro_batch` and `count` are nominal sizes. The actual sizes are smaller if requests do not fill all blocks.
    """

    micro_batch: Floats  # sequences of a micro-batch
    count: Floats  # micro-batches of a block
    resident: Floats  # number of layers with weights in compute memory
    kv_fraction: Floats  # share of layers with KV in compute memory
    order: NDArray[np.int64]  # index in `ORDERS`
    attention: NDArray[np.int64]  # index in `ATTENTIONS`
    shares_experts: Bools  # the CPU computes some of the experts in host memory
    num_requests: int

    @property
    def num_blocks(self) -> Floats:
        """The number of blocks that the requests fill."""
        return np.maximum(1, np.ceil(self.num_requests / (self.micro_batch * self.count)))

    @property
    def sequences(self) -> Floats:
        """The actual number of sequences per block."""
        return self.num_requests / self.num_blocks

    @property
    def lanes(self) -> Floats:
        """The actual number of lanes per block."""
        return np.ceil(self.sequences / self.micro_batch)

    @property
    def rows(self) -> Floats:
        """The actual number of sequences per lane."""
        return self.sequences / self.lanes

    @property
    def cpu_attends(self) -> Bools:
        """True for policies with attention on the CPU."""
        return self.attention == ATTENTIONS.index(Attention.cpu)

    @property
    def batches_experts(self) -> Bools:
        """True for policies that run a layer's experts once for all lanes."""
        return np.array([order.style.batches_experts for order in ORDERS])[self.order]

    @property
    def crosses_stages(self) -> Bools:
        """True for policies whose lanes may enter the next layer before all lanes have left this one."""
        return np.array([order.style.crosses_stages for order in ORDERS])[self.order]

    def tokens_at_once(self, tokens: Floats) -> tuple[Floats, Floats]:
        """Returns the tokens for which a layer's experts run at once, and how often they run in a pass.

        `tokens`: tokens per lane.
        """
        is_batched = self.batches_experts
        return np.where(is_batched, self.lanes * tokens, tokens), np.where(is_batched, 1.0, self.lanes)

    def num_slots(self, prefetch: PrefetchConfig) -> NDArray[np.int64]:
        """Returns the weight slots of each policy."""
        return np.array([num_weight_slots(prefetch, order) for order in ORDERS])[self.order]

    @property
    def num_ahead(self) -> NDArray[np.int64]:
        """How many lanes may run ahead while a lane waits for CPU attention, for each policy."""
        return np.array([order.style.num_ahead for order in ORDERS])[self.order]

    def by_lane_size(self, function: Callable[[int], float]) -> Floats:
        """Returns `function` of the nominal micro-batch size, for each policy."""
        return by_size(self.micro_batch, function)

    def by_sharing_size(self, function: Callable[[int], float], has_device: bool) -> Floats:
        """Returns `function` of the number of sequences that may share prefixes, for each policy.

        These are the sequences of a block, or those of a lane if KV is offloaded.
        """
        is_offloaded = (self.kv_fraction < 1) & ~(has_device & self.cpu_attends)
        return by_size(np.where(is_offloaded, self.micro_batch, np.ceil(self.sequences)), function)

    def policy(self, index: int) -> Policy:
        """Returns the policy at an index, with its actual sizes. Its nominal sizes would make the same blocks."""
        only = self.select(np.array([index]))
        return Policy(
            micro_batch_size=int(np.ceil(only.rows[0])),
            num_micro_batches=int(only.lanes[0]),
            attention=ATTENTIONS[self.attention[index]],
            schedule=ORDERS[self.order[index]],
            resident_layers=int(self.resident[index]),
            kv_fraction=float(self.kv_fraction[index]),
            feedforward=FeedForward.cpu if self.shares_experts[index] else FeedForward.device,
        )

    def single(self, policy: Policy) -> "PolicyGrid":
        """Returns a grid of one policy for the same requests. The policy need not be in this grid."""
        return PolicyGrid(
            micro_batch=np.array([float(policy.micro_batch_size)]),
            count=np.array([float(policy.num_micro_batches)]),
            resident=np.array([float(policy.resident_layers)]),
            kv_fraction=np.array([policy.kv_fraction]),
            order=np.array([ORDERS.index(policy.schedule)]),
            attention=np.array([ATTENTIONS.index(policy.attention)]),
            shares_experts=np.array([policy.feedforward is FeedForward.cpu]),
            num_requests=self.num_requests,
        )

    def select(self, mask: Bools | NDArray[np.int64]) -> "PolicyGrid":
        """Returns a grid with some of the policies, by mask or by indices."""
        axes = {axis: values[mask] for axis, values in vars(self).items() if axis != "num_requests"}
        return PolicyGrid(**axes, num_requests=self.num_requests)


def by_size(sizes: Floats, function: Callable[[int], float]) -> Floats:
    """Returns `function` of each size, computed once per distinct size."""
    unique_sizes, inverse = np.unique(sizes, return_inverse=True)
    return np.array([float(function(int(size))) for size in unique_sizes])[inverse]


@dataclass(frozen=True, kw_only=True)
class GridAxes:
    """The values of each axis of a grid."""

    micro_batches: Sequence[int]  # sizes
    counts: Sequence[int]  # micro-batches per block
    resident: Sequence[int]  # numbers of layers
    variants: Sequence[tuple[Order, Attention, float]]  # valid combinations with KV fractions
    feedforwards: Sequence[FeedForward] = (FeedForward.device,)

    @staticmethod
    def from_config(shape: ModelShape, config: RuntimeConfig, num_requests: int, *, has_device: bool) -> "GridAxes":
        """Makes the axes. A configured value is the only one of its axis, except `num_micro_batches`, a maximum."""
        policy, num_layers, num_resident = config.policy, len(shape.layers), config.offload.resident_layers
        size, max_count = policy.micro_batch_size, policy.num_micro_batches or COUNTS[-1]
        if config.tier is Tier.none or (config.tier is Tier.cpu and not has_device):
            resident = [num_layers]
        elif num_resident is not None:
            resident = [min(num_resident, num_layers)]
        else:
            resident = sorted({round(num_layers * step / NUM_RESIDENT_STEPS) for step in range(NUM_RESIDENT_STEPS + 1)})
        if policy.feedforward is not None:
            feedforwards = [policy.feedforward]
        else:
            can_share = cpu_experts_obstacle(shape, config, has_device=has_device) is None
            feedforwards = [each for each in FeedForward if can_share or each is FeedForward.device]
        return GridAxes(
            micro_batches=_up_to(MICRO_BATCHES, num_requests) if size is None else [min(size, max(1, num_requests))],
            counts=_up_to(COUNTS, max(1, min(max_count, num_requests))),
            resident=resident,
            variants=_variants(shape, config, has_device=has_device),
            feedforwards=feedforwards,
        )

    def grid(self, num_requests: int) -> PolicyGrid:
        """Returns all combinations of the axes, without blocks that have more micro-batches than requests can fill."""
        axes = [np.asarray(axis, dtype=np.float64) for axis in (self.micro_batches, self.counts, self.resident)]
        variants = np.arange(len(self.variants), dtype=np.float64)
        shares = [float(each is FeedForward.cpu) for each in self.feedforwards]
        product = np.meshgrid(*axes, variants, shares, indexing="ij")
        micro, count, resident, variant, shared = (axis.ravel() for axis in product)
        is_needed = micro * (count - 1) < max(1, num_requests)
        orders = np.asarray([ORDERS.index(order) for order, _, _ in self.variants])
        attentions = np.asarray([ATTENTIONS.index(attention) for _, attention, _ in self.variants])
        fractions = np.asarray([fraction for _, _, fraction in self.variants])
        variant = variant[is_needed].astype(np.int64)
        return PolicyGrid(
            micro_batch=micro[is_needed],
            count=count[is_needed],
            resident=resident[is_needed],
            kv_fraction=fractions[variant],
            order=orders[variant],
            attention=attentions[variant],
            shares_experts=shared[is_needed] > 0,
            num_requests=num_requests,
        )


def _up_to(values: Sequence[int], limit: int) -> list[int]:
    """Returns the values below `limit`, and `limit` itself unless it exceeds all values."""
    return [value for value in values if value < limit] + [limit] * (1 <= limit <= values[-1])


def _variants(shape: ModelShape, config: RuntimeConfig, *, has_device: bool) -> list[tuple[Order, Attention, float]]:
    """Returns the combinations of order, attention and KV fraction that the settings allow.

    If `policy.attention=cpu` is unsupported, attention runs on the device and `plan/plan_warnings.py` warns.
    """
    policy = config.policy
    fractions = {each: _kv_fractions(shape, config, each, has_device=has_device) for each in Attention}
    methods = [each for each in Attention if fractions[each]]
    if policy.attention in methods:
        methods = [policy.attention]

    def orders(attention: Attention) -> list[Order]:
        configured = policy.schedule
        if configured is not None:
            return [configured if attention is Attention.cpu else configured.without_cpu_attention]
        return [
            order
            for order in Order
            if num_weight_slots(config.prefetch, order) >= order.style.num_slots
            and (shape.has_grouped_experts or not order.style.batches_experts)
            and (attention is Attention.cpu or not order.style.needs_cpu_attention)
        ]

    return [
        (order, attention, fraction)
        for attention in methods
        for fraction in fractions[attention]
        for order in orders(attention)
    ]


def _kv_fractions(
    shape: ModelShape, config: RuntimeConfig, attention: Attention, *, has_device: bool
) -> tuple[float, ...]:
    """Returns the candidate KV fractions; empty if the CPU cannot attend to KV in the configured tier."""
    can_offload = config.kv.tier is not KVTier.device and (has_device or config.kv.tier is not KVTier.cpu)
    if attention is Attention.cpu:
        policy = Policy(
            micro_batch_size=1,
            num_micro_batches=1,
            attention=attention,
            schedule=PLAIN,
            resident_layers=0,
            kv_fraction=1.0,
        ).apply(config, has_device=has_device)
        if not cpu_attends(shape, policy, has_device=has_device):
            return ()
        if has_device:
            return (0.0,) if cpu_attention_obstacle(shape, config) is None else ()
    if not can_offload:
        return (1.0,)
    return KV_FRACTIONS if config.kv.device_fraction is None else (config.kv.device_fraction,)
