"""From requests and budgets to a plan: the blocks, the placement of the weights, and how long it should take. Pure.

The composition of blocks can change the text in its last bits (products of other shapes round otherwise), so a run
keeps the blocks it began with; the placement may differ each time it is resumed, and so may the chunks of its prompts,
which go by measured rates where neither the settings nor a search's recorded policy say them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..batching.balance import Block, plan_blocks
from ..config import KVConfig, Order, PolicyConfig, PolicyKind, PrefetchConfig, RuntimeConfig
from ..errors import BudgetError
from .cost.machine import Machine
from .cost.predict import Prediction
from .cost.rates import MachineRates
from .placement.defaults import block_size, chunk_sizes, in_chunks, is_whole, micro_batch_sizes, usual_orders
from .placement.memory import SequenceSize
from .placement.placement import Budgets, Placement
from .placement.placer import kv_tiers, place
from .placement.run_load import bare, run_load
from .search.candidate import Road, Way
from .search.choice import Choice
from .search.chunks import balanced
from .search.grid import Choices
from .search.hrm import search
from .search.policy import Policy
from .search.workload import Workload
from .shape.model import ModelShape

WORTHWHILE = 0.02  # of a run's time, to be won by another size of micro-batches than the rule's


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """`rates` are those that it was planned by, None where nothing was measured, and then there is no `prediction`
    either. `choice` is None when nothing was searched, `searched` when no search, neither this one nor an earlier, came
    to how it goes."""

    blocks: tuple[Block, ...]
    budgets: Budgets
    placement: Placement
    policy: PolicyConfig  # as resolved: hrm has become fixed; tokens of a prefill pass are said
    kv: KVConfig  # as resolved with it
    prefetch: PrefetchConfig  # as resolved: cost_aware has become a depth
    rates: MachineRates | None
    prediction: Prediction | None
    choice: Choice | None = None
    searched: Policy | None = None

    @property
    def block_size(self) -> int:
        """Most sequences of a block."""
        return max((len(block.members) for block in self.blocks), default=0)

    @property
    def num_lanes(self) -> int:
        """Most micro-batches side by side."""
        return max((len(block.micro_batches) for block in self.blocks), default=1)

    @property
    def lane_size(self) -> int:
        """Most sequences of a micro-batch."""
        return max((len(group) for block in self.blocks for group in block.micro_batches), default=1)


def plan_run(
    shape: ModelShape,
    config: RuntimeConfig,
    budgets: Budgets,
    sizes: Sequence[SequenceSize],
    *,
    rates: MachineRates | None = None,
    blocks: tuple[Block, ...] | None = None,
    num_halvings: int = 0,
) -> RunPlan:
    """`blocks` are those of a run that is resumed. `num_halvings`: how often memory has run out with a policy that is
    chosen here; chunks then are as small as they should be. Without `rates` there is nothing to search by, and
    `policy=hrm` plans as `auto` does.

    Raises BudgetError, with the equation, when even the smallest block does not fit.
    """
    if config.policy.kind is PolicyKind.hrm and rates is not None and sizes:
        return _plan_best(shape, config, budgets, sizes, rates, blocks, num_halvings)
    if config.policy.schedule is not None:
        return _plan_in_order(shape, config, budgets, sizes, rates, blocks, num_halvings)
    best, refusal = None, None
    for order in usual_orders(shape, has_device=budgets.has_device):
        try:
            plan = _plan_in_order(shape, _in_order(config, order), budgets, sizes, rates, blocks, num_halvings)
            best = plan if best is None or _is_better(plan, best) else best
        except BudgetError as error:
            refusal = error
    if best is None:
        raise refusal or AssertionError("there is a usual order")
    return best


def _is_better(plan: RunPlan, usual: RunPlan) -> bool:
    """By predicted time; without rates, by how many sequences share each sweep of the weights."""
    if plan.prediction is not None and usual.prediction is not None:
        return plan.prediction.seconds < (1 - WORTHWHILE) * usual.prediction.seconds
    return plan.block_size > usual.block_size


def _in_order(config: RuntimeConfig, order: Order) -> RuntimeConfig:
    return replace(config, policy=replace(config.policy, schedule=order))


def _plan_in_order(
    shape: ModelShape,
    config: RuntimeConfig,
    budgets: Budgets,
    sizes: Sequence[SequenceSize],
    rates: MachineRates | None,
    blocks: tuple[Block, ...] | None,
    num_halvings: int,
) -> RunPlan:
    """As `plan_run`, where the order is said and nothing is searched."""
    road = Road(shape=shape, config=config, budgets=budgets, sizes=sizes, rates=rates)
    if blocks is None:
        starts = _starts(road, num_halvings)
    else:
        *better, chunk = chunk_sizes(shape, config.policy, blocks)
        if better:
            chunk = _fitting_chunk(shape, bare(config), budgets, sizes, blocks, wholly=True) or chunk
        starts = [road.way(blocks, chunk)]
    starts[0].placement.require_fit()
    if config.policy.prefill_chunk_tokens is None and not num_halvings:
        starts = [balanced(road, way) for way in starts]
    way, prediction = _fastest(road, starts)
    return RunPlan(
        blocks=way.blocks,
        budgets=budgets,
        placement=way.placement,
        policy=way.config.policy,
        kv=config.kv,
        prefetch=way.prefetch,
        rates=rates,
        prediction=prediction,
    )


def _fastest(road: Road, ways: Sequence[Way]) -> tuple[Way, Prediction | None]:
    """The first, unless another one is clearly faster."""
    best, shortest = ways[0], road.predicted(ways[0])
    for way in ways[1:]:
        found = road.predicted(way)
        if found is not None and shortest is not None and found.seconds < (1 - WORTHWHILE) * shortest.seconds:
            best, shortest = way, found
    return best, shortest


def _starts(road: Road, num_halvings: int) -> list[Way]:
    """Ways in the smallest chunks, the best by rule first. In front of an accelerator one large micro-batch is launched
    once, and four small ones prefill as many tokens per sweep of the weights in less memory: rates tell which is
    faster, and without them it is the large one where nothing travels."""

    def way(widths: tuple[int, ...]) -> Way:
        chunk, blocks = _choose_blocks(road.shape, road.config, road.budgets, road.sizes, widths, num_halvings)
        return road.way(blocks, chunk)

    widths = micro_batch_sizes(road.shape, road.config, road.budgets)[-1 if num_halvings else 0 :]
    found = way(widths)
    if not road.budgets.has_device or len(widths) == 1:
        return [found]
    usual = way(widths[-1:])
    if usual.blocks == found.blocks or not usual.placement.fits:
        return [found]
    return [found, usual] if found.placement.stays_whole else [usual, found]


def _plan_best(
    shape: ModelShape,
    config: RuntimeConfig,
    budgets: Budgets,
    sizes: Sequence[SequenceSize],
    rates: MachineRates,
    blocks: tuple[Block, ...] | None,
    num_halvings: int,
) -> RunPlan:
    """Of a run that is resumed, only the way its blocks go is chosen."""

    @cache
    def blocks_of(micro_batch_size: int, num_micro_batches: int) -> tuple[Block, ...]:
        return _blocks(shape, sizes, micro_batch_size, num_micro_batches)

    def plan(fixed: RuntimeConfig) -> RunPlan:
        size, count = fixed.policy.micro_batch_size, fixed.policy.num_micro_batches
        assert size is not None, "a search says it"
        assert count is not None, "a search says it"
        made = blocks if blocks is not None else blocks_of(size, count)
        return plan_run(shape, fixed, budgets, sizes, rates=rates, blocks=made)

    machine = Machine(
        name="this machine",
        host_bytes=budgets.host_bytes,
        device_bytes=budgets.device_bytes,
        library_bytes=budgets.library_bytes,
        rates=rates,
    )
    choices = Choices.of(shape, config, len(sizes), has_device=budgets.has_device)
    usual = None
    if blocks:
        choices = choices.of_blocks([[len(lane) for lane in block.micro_batches] for block in blocks])
    else:
        usual = _policy_of(plan_run(shape, config, budgets, sizes), shape)  # without rates: as auto does
    choice = search(shape, machine, Workload.of(sizes), config, plan, choices=choices, usual=usual)
    best = choice.best.policy.halved(num_halvings)
    return replace(plan(best.applied(config, has_device=budgets.has_device)), choice=choice, searched=best)


def _policy_of(plan: RunPlan, shape: ModelShape) -> Policy:
    order = plan.policy.schedule
    assert order is not None, "a plan says it"
    num_travelling, num_fixed = len(plan.placement.kv.page_bytes), len(shape.bounded_layers)
    num_layers = sum(1 for size in shape.kv_layer_bytes if size) - num_fixed
    return Policy(
        micro_batch_size=plan.lane_size,
        num_micro_batches=plan.num_lanes,
        attention=plan.policy.attention,
        schedule=order,
        resident_layers=sum(stage.index in plan.placement.resident for stage in shape.layers),
        kv_fraction=1 - num_travelling / num_layers if num_layers > 0 else 1.0,
    )


def _choose_blocks(
    shape: ModelShape,
    config: RuntimeConfig,
    budgets: Budgets,
    sizes: Sequence[SequenceSize],
    widths: Sequence[int],
    num_halvings: int,
) -> tuple[int, tuple[Block, ...]]:
    """Tokens of their chunks, and the blocks. `fixed`: as configured. `auto`: the most sequences, up to what is
    configured, whose block fits with no more resident layers than `offload.resident_layers` asks for. Of the `widths`
    of micro-batches the first that costs no room which something else needs, or the last."""

    def counts(num_sequences: int) -> list[int]:
        return list(dict.fromkeys(-(-num_sequences // width) for width in widths))

    def divided(num_sequences: int, count: int) -> tuple[Block, ...]:
        return _blocks(shape, sizes, -(-num_sequences // count), count)

    most = block_size(config.policy)
    if config.policy.kind is PolicyKind.fixed:
        *large, usual = counts(most)
        for blocks in (divided(most, count) for count in large):
            if chunk := _fitting_chunk(shape, bare(config), budgets, sizes, blocks, wholly=True):
                return chunk, blocks
        blocks = divided(most, usual)
        return chunk_sizes(shape, config.policy, blocks)[-1], blocks
    blocks: tuple[Block, ...] = ()
    for tier in kv_tiers(shape, config, has_device=budgets.has_device):
        in_tier = replace(bare(config), kv=replace(config.kv, tier=tier))
        for num_sequences in _ladder(max(1, min(most, len(sizes)) >> num_halvings)):
            *large, usual = counts(num_sequences)
            for count in (*large, usual):
                blocks = divided(num_sequences, count)
                if chunk := _fitting_chunk(shape, in_tier, budgets, sizes, blocks, wholly=count != usual):
                    return chunk, blocks
    return chunk_sizes(shape, config.policy, blocks)[-1], blocks


def _fitting_chunk(
    shape: ModelShape,
    config: RuntimeConfig,
    budgets: Budgets,
    sizes: Sequence[SequenceSize],
    blocks: tuple[Block, ...],
    *,
    wholly: bool,
) -> int | None:
    """Tokens of the best chunks with which these blocks fit."""
    for chunk in chunk_sizes(shape, config.policy, blocks):
        chunked = in_chunks(config, chunk)
        load = run_load(shape, chunked, budgets, blocks, sizes)
        placement = place(shape, chunked, budgets, load) if load.is_roomy else None
        if placement is not None and placement.fits and (not wholly or is_whole(placement)):
            return chunk
    return None


def _blocks(
    shape: ModelShape, sizes: Sequence[SequenceSize], micro_batch_size: int, num_micro_batches: int
) -> tuple[Block, ...]:
    return plan_blocks(
        [size.capacity_tokens for size in sizes],
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        is_packed=shape.is_packed,
    )


def _ladder(most: int) -> list[int]:
    """most, 3/4, 1/2, 3/8 ... 1 of it."""
    steps = {most >> turn for turn in range(most.bit_length())} | {
        3 * most >> turn + 2 for turn in range(most.bit_length())
    }
    return sorted(steps - {0}, reverse=True)
