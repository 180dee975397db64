"""Plans a run from requests and memory budgets: blocks, placement of weights and KV cache, and predicted time.

A **block** is the set of micro-batches that decode together and share each read of the weights. The matrix products of
another block have other shapes, round differently, and can change generated text. So a resumed run keeps its blocks,
and keeps its prefill chunks as long as they fit in memory. Its placement may change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..batching.balance import Block
from ..batching.prefixes import SharedPrefix
from ..config.profiles import BackendTable
from ..config.settings import (
    Attention,
    FeedForward,
    KVConfig,
    PolicyConfig,
    PolicyKind,
    PrefetchConfig,
    RuntimeConfig,
)
from ..errors import BudgetError, require
from .cost.predict import Prediction
from .cost.rates import MachineRates
from .placement.defaults import default_orders, micro_batch_sizes
from .placement.memory import SequenceSize
from .placement.placement import Budgets, Placement
from .search.candidate import PlacedRun, Problem, choose_blocks, place_existing_blocks, tune_chunks
from .search.drafts import NO_DRAFTS, DraftPlan, choose_drafts, place_beside_drafts
from .search.hrm import SearchResult, search
from .search.policy import Policy
from .shape.model import ModelShape

WORTHWHILE = 0.02  # minimum saving of a non-default order or micro-batch size, as a share of the run's time
# Minimum predicted time of the default plan for a policy search, which takes about one second and may halve that time.
MIN_SEARCHED_SECONDS = 4.0


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a run."""

    blocks: tuple[Block, ...]
    budgets: Budgets
    placement: Placement
    policy: PolicyConfig  # without automatic values: attention and prefill chunks are set
    kv: KVConfig  # without automatic values
    prefetch: PrefetchConfig  # `cost_aware` is replaced by a depth
    rates: MachineRates | None  # None: not measured
    prediction: Prediction | None  # None: no rates
    choice: SearchResult | None = None  # result of the policy search for this plan; None: no search
    searched_policy: Policy | None = None  # result of the latest search, perhaps for an earlier plan of this run
    prefixes: Sequence[SharedPrefix | None] = ()  # longest shared prefix of each request; empty: none is shared
    drafts: DraftPlan = NO_DRAFTS
    backends: BackendTable | None = None  # implementations of a CPU's matrix products; None: not chosen

    @property
    def block_size(self) -> int:
        """The number of sequences of the largest block."""
        return max((len(block.members) for block in self.blocks), default=0)

    @property
    def num_lanes(self) -> int:
        """The largest number of micro-batches in a block. A **lane** is a running micro-batch."""
        return max((len(block.micro_batches) for block in self.blocks), default=1)

    @property
    def lane_size(self) -> int:
        """The number of sequences of the largest micro-batch."""
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
    """Calls `plan_policy` with a `Problem` made of these values."""
    problem = Problem(shape=shape, config=config, budgets=budgets, sizes=sizes, rates=rates)
    return plan_policy(problem, blocks=blocks, num_halvings=num_halvings)


def plan_policy(problem: Problem, *, blocks: tuple[Block, ...] | None = None, num_halvings: int = 0) -> RunPlan:
    """Returns the plan of the configured policy. Settings that are not configured get defaults.

    `blocks`: existing blocks of a resumed run. `num_halvings`: number of out-of-memory errors so far. Each error halves
    the block of an automatic policy, and after any error the prefill chunks keep their default size.

    Raises BudgetError, with the table of memory use, if not even the smallest block fits.
    """
    if problem.config.policy.schedule is not None:
        return _plan_with_order(problem, blocks, num_halvings)
    best, last_error, config = None, None, problem.config
    for order in default_orders(problem.shape, has_device=problem.budgets.has_device):
        try:
            ordered = replace(config, policy=replace(config.policy, schedule=order))
            plan = _plan_with_order(replace(problem, config=ordered), blocks, num_halvings)
        except BudgetError as error:
            last_error = error
            continue
        if best is None:
            best = plan
        elif plan.prediction is not None and best.prediction is not None:
            best = plan if plan.prediction.seconds < (1 - WORTHWHILE) * best.prediction.seconds else best
        elif plan.block_size > best.block_size:  # no predicted times: prefer more sequences per read of the weights
            best = plan
    if best is None:
        raise last_error or AssertionError("there is always a default order")
    return best


def find_policy(problem: Problem, *, blocks: tuple[Block, ...] | None = None, num_halvings: int = 0) -> RunPlan:
    """Searches the fastest policy and returns its plan. Returns the default plan if a search is not worthwhile.

    Parameters and errors are those of `plan_policy`. With existing `blocks` the search keeps their sizes, and varies
    only the order, the KV placement, and the processors for attention and experts.
    """
    default_plan = plan_policy(problem, blocks=blocks, num_halvings=num_halvings)
    if not is_search_worthwhile(problem.config.policy.kind, default_plan):
        return default_plan
    default = None if blocks else _make_policy(default_plan, problem.shape)
    choice, run, prediction = search(problem, blocks=blocks, default=default)
    best = choice.best.policy.halve(num_halvings)
    if num_halvings:
        fixed = problem.with_policy(best)
        if blocks is None:
            blocks = fixed.blocks(best.micro_batch_size, best.num_micro_batches)
        plan = plan_policy(fixed, blocks=blocks)
    else:
        plan = _run_plan(problem, run, prediction)
    return replace(plan, choice=choice, searched_policy=best)


def is_search_worthwhile(kind: PolicyKind, default_plan: RunPlan) -> bool:
    """True with `policy=hrm`, or with `auto` if the default plan takes several times as long as a search.

    False without measured rates or without requests.
    """
    if kind is PolicyKind.fixed or default_plan.prediction is None or not default_plan.blocks:
        return False
    return kind is PolicyKind.hrm or default_plan.prediction.seconds >= MIN_SEARCHED_SECONDS


def _run_plan(problem: Problem, run: PlacedRun, prediction: Prediction | None) -> RunPlan:
    model, policy, quantize = problem.config.model, run.config.policy, problem.config.model.quantize
    drafts = choose_drafts(problem, run)
    num_read = len({*run.placement.walk.from_disk, *run.placement.decode_walk.from_disk})
    require(
        quantize is None or not num_read,
        f"model.quantize={quantize and quantize.value} with offload={problem.config.offload.tier.value} would quantize "
        f"{num_read} stages again in every pass: pack the weights once ({model.pack_command}), or set offload=auto, "
        "which keeps quantized weights in memory",
    )
    return RunPlan(
        blocks=run.blocks,
        budgets=problem.budgets,
        placement=run.placement,
        policy=replace(
            policy,
            attention=policy.attention or Attention.device,
            feedforward=policy.feedforward or FeedForward.device,
            draft_tokens=drafts.max_tokens,
        ),
        drafts=drafts,
        kv=run.config.kv,
        prefetch=run.prefetch,
        rates=problem.rates,
        prediction=prediction,
        prefixes=[size.prefix for size in problem.sizes] if any(size.prefix for size in problem.sizes) else (),
    )


def _plan_with_order(problem: Problem, blocks: tuple[Block, ...] | None, num_halvings: int) -> RunPlan:
    initial = _initial_runs(problem, num_halvings) if blocks is None else [place_existing_blocks(problem, blocks)]
    initial[0].placement.require_fit(problem.config)
    if not num_halvings:
        initial = [place_beside_drafts(problem, tune_chunks(problem, run)) for run in initial]
    best, shortest = initial[0], problem.predict(initial[0])
    for run in initial[1:]:  # the first run is the default: another must be clearly faster
        prediction = problem.predict(run)
        if prediction and shortest and prediction.seconds < (1 - WORTHWHILE) * shortest.seconds:
            best, shortest = run, prediction
    return _run_plan(problem, best, shortest)


def _initial_runs(problem: Problem, num_halvings: int) -> list[PlacedRun]:
    """Returns one or two runs with default prefill chunks: with large or with small micro-batches.

    On an accelerator, one large micro-batch launches fewer kernels than four small ones. The small ones prefill as many
    tokens per read of the weights in less memory. The caller compares the runs if it has rates. Without rates it takes
    the first: large micro-batches if everything is resident in device memory, otherwise small ones.
    """

    def place(lane_sizes: tuple[int, ...]) -> PlacedRun:
        chunk, blocks = choose_blocks(problem, lane_sizes, num_halvings)
        return problem.place_blocks(blocks, chunk)

    candidates = micro_batch_sizes(problem.shape, problem.config, problem.budgets)
    lane_sizes = candidates[-1:] if num_halvings else candidates
    largest = place(lane_sizes)
    if not problem.budgets.has_device or len(lane_sizes) == 1:
        return [largest]
    smallest = place(lane_sizes[-1:])
    if smallest.blocks == largest.blocks or not smallest.placement.fits:
        return [largest]
    return [largest, smallest] if largest.placement.is_fully_resident else [smallest, largest]


def _make_policy(plan: RunPlan, shape: ModelShape) -> Policy:
    """Returns the policy that `plan` follows, as a candidate for the search."""
    order = plan.policy.schedule
    assert order is not None, "a plan has an order"
    num_offloaded, num_bounded = len(plan.placement.kv.page_bytes), len(shape.bounded_layers)
    num_layers = sum(1 for size in shape.kv_layer_bytes if size) - num_bounded  # layers with KV that could be offloaded
    return Policy(
        micro_batch_size=plan.lane_size,
        num_micro_batches=plan.num_lanes,
        attention=plan.policy.attention or Attention.device,
        feedforward=plan.policy.feedforward or FeedForward.device,
        schedule=order,
        resident_layers=sum(stage.index in plan.placement.resident for stage in shape.layers),
        kv_fraction=1 - num_offloaded / num_layers if num_layers > 0 else 1.0,
    )
