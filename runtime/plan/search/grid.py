"""All policies that a search looks at, as arrays of equal length: one element each of every array is a policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...config.orders import PLAIN, Order
from ...config.settings import Attention, FeedForward, KVDType, KVTier, PrefetchConfig, RuntimeConfig, Tier
from ..placement.feedforward import cpu_experts_obstacle
from ..placement.placer import KV_FRACTIONS
from ..placement.walks import cpu_attends, num_slots_for
from ..shape.model import ModelShape
from ..shape.numbers import Bools, Floats
from .policy import Policy

MICRO_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024)
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32)
NUM_RESIDENT_STEPS = 12
ORDERS = tuple(Order)
ATTENTIONS = tuple(Attention)


@dataclass(frozen=True, kw_only=True)
class PolicyGrid:
    """`ORDERS` and `ATTENTIONS` say what `order` and `attention` number; `shares` is whether experts in host memory are
    multiplied on the CPU too. `num_requests` make blocks that are alike."""

    micro_batch: Floats
    count: Floats  # micro-batches of a block
    resident: Floats  # layers
    kv_fraction: Floats
    order: NDArray[np.int64]
    attention: NDArray[np.int64]
    shares_experts: Bools
    num_requests: int

    @property
    def num_blocks(self) -> Floats:
        return np.maximum(1, np.ceil(self.num_requests / (self.micro_batch * self.count)))

    @property
    def sequences(self) -> Floats:
        """The sequences of a block, as it comes out."""
        return self.num_requests / self.num_blocks

    @property
    def lanes(self) -> Floats:
        """The lanes of a block, as it comes out."""
        return np.ceil(self.sequences / self.micro_batch)

    @property
    def rows(self) -> Floats:
        """Sequences of a lane, as it comes out."""
        return self.sequences / self.lanes

    @property
    def cpu_attends(self) -> Bools:
        return self.attention == ATTENTIONS.index(Attention.cpu)

    @property
    def batches_experts(self) -> Bools:
        return np.array([order.style.batches_experts for order in ORDERS])[self.order]

    @property
    def crosses_stages(self) -> Bools:
        return np.array([order.style.crosses_stages for order in ORDERS])[self.order]

    def tokens_at_once(self, tokens: Floats) -> tuple[Floats, Floats]:
        """The tokens that a layer's experts see at once, where each lane has so many, and how often they do."""
        is_batched = self.batches_experts
        return np.where(is_batched, self.lanes * tokens, tokens), np.where(is_batched, 1.0, self.lanes)

    def num_slots(self, prefetch: PrefetchConfig) -> NDArray[np.int64]:
        """Slots of weights that each takes."""
        return np.array([num_slots_for(prefetch, order) for order in ORDERS])[self.order]

    @property
    def num_ahead(self) -> NDArray[np.int64]:
        return np.array([order.style.num_ahead for order in ORDERS])[self.order]

    def by_lane_size(self, number_of: Callable[[int], float]) -> Floats:
        """A number that follows from the sequences asked for of a lane."""
        return by_size(self.micro_batch, number_of)

    def by_sharing_size(self, number_of: Callable[[int], float], has_device: bool) -> Floats:
        """A number that follows from how many sequences may share a prefix: those of a block, and of a lane where keys
        and values travel."""
        travels = (self.kv_fraction < 1) & ~(has_device & self.cpu_attends)
        return by_size(np.where(travels, self.micro_batch, np.ceil(self.sequences)), number_of)

    def policy(self, index: int) -> Policy:
        """The policy at a place of the grid, with the sizes that come out, which are no larger than those asked for and
        make the same blocks."""
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
        """One policy, which need not be of the grid, for the same requests."""
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
        axes = {axis: values[mask] for axis, values in vars(self).items() if axis != "num_requests"}
        return PolicyGrid(**axes, num_requests=self.num_requests)


def by_size(sizes: Floats, number_of: Callable[[int], float]) -> Floats:
    """A number that follows from a size, for each of an array of few different ones."""
    unique_sizes, inverse = np.unique(sizes, return_inverse=True)
    return np.array([float(number_of(int(size))) for size in unique_sizes])[inverse]


@dataclass(frozen=True, kw_only=True)
class GridAxes:
    """The values of each axis. `ways`: order, attention and share of KV in compute memory that go together."""

    micro_batches: Sequence[int]
    counts: Sequence[int]
    resident: Sequence[int]
    variants: Sequence[tuple[Order, Attention, float]]
    feedforwards: Sequence[FeedForward] = (FeedForward.device,)

    @staticmethod
    def from_config(shape: ModelShape, config: RuntimeConfig, num_requests: int, *, has_device: bool) -> "GridAxes":
        """What `config` says is the only value of its axis; of the number of micro-batches it is the most."""
        policy, num_layers, wanted = config.policy, len(shape.layers), config.offload.resident_layers
        width, most = policy.micro_batch_size, policy.num_micro_batches or COUNTS[-1]
        if config.tier is Tier.none or (config.tier is Tier.cpu and not has_device):
            resident = [num_layers]
        elif wanted is not None:
            resident = [min(wanted, num_layers)]
        else:
            resident = sorted({round(num_layers * step / NUM_RESIDENT_STEPS) for step in range(NUM_RESIDENT_STEPS + 1)})
        if policy.feedforward is not None:
            feedforwards = [policy.feedforward]
        else:
            can_share = cpu_experts_obstacle(shape, config, has_device=has_device) is None
            feedforwards = [each for each in FeedForward if can_share or each is FeedForward.device]
        return GridAxes(
            micro_batches=_up_to(MICRO_BATCHES, num_requests) if width is None else [min(width, max(1, num_requests))],
            counts=_up_to(COUNTS, max(1, min(most, num_requests))),
            resident=resident,
            variants=_variants(shape, config, has_device=has_device),
            feedforwards=feedforwards,
        )

    def grid(self, num_requests: int) -> PolicyGrid:
        """Their product, without blocks that are a whole micro-batch larger than the workload."""
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


def _up_to(values: Sequence[int], most: int) -> list[int]:
    """The values below `most`, and `most` itself unless it is beyond all of them."""
    return [value for value in values if value < most] + [most] * (1 <= most <= values[-1])


def _variants(shape: ModelShape, config: RuntimeConfig, *, has_device: bool) -> list[tuple[Order, Attention, float]]:
    """Those that the settings leave open. Attention on the CPU that cannot be is the device's, see `plan/advice.py`."""
    policy = config.policy
    fractions = {each: _kv_fractions(shape, config, each, has_device=has_device) for each in Attention}
    methods = [each for each in Attention if fractions[each]]
    if policy.attention in methods:
        methods = [policy.attention]

    def orders(attention: Attention) -> list[Order]:
        asked = policy.schedule
        if asked is not None:
            return [asked if attention is Attention.cpu else asked.without_cpu_attention]
        return [
            order
            for order in Order
            if num_slots_for(config.prefetch, order) >= order.style.num_slots
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
    """The shares of keys and values to be tried; none where the CPU cannot attend, or not to where they are to lie."""
    can_travel = config.kv.tier is not KVTier.device and (has_device or config.kv.tier is not KVTier.cpu)
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
            can_be_read = shape.kv_dtype is KVDType.auto and config.kv.tier in (KVTier.auto, KVTier.cpu)
            return (0.0,) if can_be_read else ()
    if not can_travel:
        return (1.0,)
    return KV_FRACTIONS if config.kv.device_fraction is None else (config.kv.device_fraction,)
