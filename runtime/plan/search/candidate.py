"""Turns a policy into a run: divides requests into blocks, chooses prefill chunks, and places weights and KV cache.

A **block** is the set of lanes (micro-batches) that decode together. A **chunk** is the prompt tokens of a lane in one
prefill pass, which loads the weights once for the chunks of all lanes. As long as transfers limit a pass, doubling the
chunk halves the bytes per prompt. Once compute limits it, larger chunks only leave less memory for resident layers,
unless products with more rows take less time per row, as for experts with few tokens. So the chunk is doubled until
compute limits prefill and products no longer get faster. Each size is placed and timed, decode passes included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from ...batching.balance import Block, plan_blocks
from ...batching.prefixes import SharedPrefix
from ...config.settings import Admission, ExpertPaging, PolicyKind, Prefetch, PrefetchConfig, RuntimeConfig
from ...resources import Resource
from ..cost.predict import MAX_BLOCKS, Prediction, decode_pass_seconds, pick_evenly, predict, predict_roughly
from ..cost.rates import MachineRates
from ..cost.work import with_cpu_share
from ..placement.defaults import block_size, chunk_sizes, chunk_tokens, has_all_kv_in_compute, with_chunk_tokens
from ..placement.experts import Routing
from ..placement.load import Load
from ..placement.memory import SequenceSize, pass_tokens
from ..placement.placement import Budgets, Placement
from ..placement.placer import choose_placement, kv_tiers
from ..placement.run_load import least_memory_config, run_load
from ..shape.model import ModelShape
from .policy import Policy

SAMPLE_GROUP = 64  # a sample of requests consists of groups of this many neighbors
MAX_DEPTH = 4  # maximum depth of prefetch=cost_aware: a larger depth only takes memory from resident layers
NOTABLE = 0.05  # minimum share of stalls in a prefill pass, or relative gain of a product's rate, to try a larger chunk
MIN_SAVING = 0.02  # minimum saving by a larger chunk, as a share of the prefill time, or by kept experts, of all
UNLIMITED_TOKENS = 1 << 40  # no limit on a chunk


@dataclass(frozen=True, kw_only=True)
class PlacedRun:
    """A run with its placement, which may not fit."""

    blocks: tuple[Block, ...]
    config: RuntimeConfig  # with the prefill chunk
    load: Load
    prefetch: PrefetchConfig  # `cost_aware` is replaced by a depth
    placement: Placement

    @property
    def chunk_tokens(self) -> int:
        return chunk_tokens(self.config.policy)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Inputs of a plan."""

    shape: ModelShape
    config: RuntimeConfig
    budgets: Budgets
    sizes: Sequence[SequenceSize]  # by request
    rates: MachineRates | None  # None: not measured
    routing: Routing | None = None  # hits of experts that an earlier session of the run has counted

    def with_policy(self, policy: Policy) -> "Problem":
        """Returns the problem with `policy` fixed in its settings."""
        return replace(self, config=policy.apply(self.config, has_device=self.budgets.has_device))

    def blocks(self, micro_batch_size: int, num_micro_batches: int) -> tuple[Block, ...]:
        """Divides all requests into blocks of at most `num_micro_batches` with `micro_batch_size` sequences."""
        return plan_blocks(
            [size.capacity_tokens for size in self.sizes],
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            is_packed=self.shape.is_packed,
            prefixes=self._prefixes,
            is_continuous=self.config.policy.admission is Admission.continuous,
            num_beams=self.sizes[0].num_beams if self.sizes else 1,
        )

    @cached_property
    def _prefixes(self) -> Sequence[SharedPrefix | None]:
        return [size.prefix for size in self.sizes] if self.shape.is_packed else ()

    def sample(self, count: int) -> "Problem":
        """Returns the problem for `count` of its requests, in evenly spaced groups of neighbors.

        Neighbors may share prefixes.
        """
        if count >= len(self.sizes):
            return self
        groups = [
            self._sorted_by_prefix[begin : begin + SAMPLE_GROUP]
            for begin in range(0, len(self._sorted_by_prefix), SAMPLE_GROUP)
        ]
        num_groups = -(-count // SAMPLE_GROUP)
        sampled = [each for i in range(num_groups) for each in groups[i * len(groups) // num_groups]]
        return replace(self, sizes=sampled[:count])

    @cached_property
    def _sorted_by_prefix(self) -> Sequence[SequenceSize]:
        """All sizes, sorted so that requests with a common prefix are neighbors."""
        prefix_numbers = dict[SharedPrefix, int]()

        def path(size: SequenceSize) -> list[int]:
            """Returns the numbers of the request's prefixes, shortest prefix first."""
            chain = size.prefix.chain if size.prefix is not None else ()
            return [prefix_numbers.setdefault(each, len(prefix_numbers)) for each in chain][::-1]

        return sorted(self.sizes, key=path)

    def place_blocks(self, blocks: tuple[Block, ...], num_tokens: int) -> PlacedRun:
        """Places these blocks with chunks of `num_tokens`, and resolves a cost-aware prefetch depth."""
        shape, budgets, config = self.shape, self.budgets, with_chunk_tokens(self.config, num_tokens)
        load = run_load(shape, config, budgets, blocks, self.sizes)
        prefetch = least_memory_config(config).prefetch
        if config.prefetch.kind is not Prefetch.cost_aware or self.rates is None:
            placement = self.choose_placement(replace(config, prefetch=prefetch), load)
        else:
            # Choose the depth with the shortest decode pass. A deeper one must save 1%: its slots take memory.
            placement, shortest = None, inf
            for depth in range(1, MAX_DEPTH + 1):
                deeper = PrefetchConfig(kind=Prefetch.lookahead, depth=depth)
                deeper_placement = self.choose_placement(replace(config, prefetch=deeper), load)
                seconds = decode_pass_seconds(shape, deeper_placement, load.lanes, self.rates)
                if placement is None or (deeper_placement.fits and seconds < 0.99 * shortest):
                    shortest, prefetch, placement = seconds, deeper, deeper_placement
            assert placement is not None
        return PlacedRun(blocks=blocks, config=config, load=load, prefetch=prefetch, placement=placement)

    def predict(self, run: PlacedRun) -> Prediction | None:
        """Returns the predicted time of `run`; None without rates."""
        if self.rates is None:
            return None
        admission = run.config.policy.admission
        return predict(self.shape, run.placement, run.blocks, self.sizes, run.chunk_tokens, self.rates, admission)

    def choose_placement(self, config: RuntimeConfig, load: Load) -> Placement:
        """Returns the placement of a load, with the CPU's share of experts derived from the rates.

        If experts are read one by one, memory may keep single experts in place of whole layers. The simulator decides,
        with an even router until `routing` is known. Without rates, memory keeps whole layers.
        """
        whole = replace(choose_placement(self.shape, config, self.budgets, load), routing=self.routing)
        whole = with_cpu_share(self.shape, whole, self.rates)
        is_free = config.offload.resident_layers is None and config.offload.kept_experts != 0
        has_layers = any(self.shape.stages[stage].experts for stage in whole.resident - whole.paged)
        if self.rates is None or whole.paging is not ExpertPaging.hit or not has_layers or not is_free:
            return whole
        single = choose_placement(self.shape, config, self.budgets, load, keeps_experts=True)
        if not single.fits or not single.num_kept_experts or single.kv != whole.kv:
            return whole
        single = replace(single, routing=self.routing)
        whole_run, single_run = (
            predict_roughly(self.shape, placement, load.lanes, load.chunk_tokens, self.rates)
            for placement in (whole, single)
        )
        return single if self.favors_single(single_run, whole_run) else whole

    def favors_single(self, single: Prediction, whole: Prediction) -> bool:
        """True if a run should keep single experts as in `single`, rather than layers as in `whole`.

        With a known routing, this must save the share `MIN_SAVING` of the time. Otherwise it must save that share of
        the reads and take no more time: a router that proves uneven will save more.
        """
        if self.routing is not None:
            return single.seconds < (1 - MIN_SAVING) * whole.seconds
        saves_reads = _disk_seconds(single) < (1 - MIN_SAVING) * _disk_seconds(whole)
        return saves_reads and single.seconds <= whole.seconds


def _disk_seconds(prediction: Prediction) -> float:
    return sum(phase.busy_seconds[Resource.disk] for phase in (prediction.prefill, prediction.decode))


def place_existing_blocks(problem: Problem, blocks: tuple[Block, ...]) -> PlacedRun:
    """Places existing blocks with the first of the default chunks that fits."""
    *larger, chunk = chunk_sizes(problem.shape, problem.config.policy, blocks)
    if larger:
        chunk = _fitting_chunk(problem, least_memory_config(problem.config), blocks, all_in_compute=True) or chunk
    return problem.place_blocks(blocks, chunk)


def choose_blocks(problem: Problem, widths: Sequence[int], num_halvings: int) -> tuple[int, tuple[Block, ...]]:
    """Returns the prefill chunk in tokens, and the blocks.

    With `policy=fixed`, blocks have the configured size. Otherwise they have as many sequences, up to the configured
    number, as fit if no layer is resident. `widths`: candidate micro-batch sizes. The first one with which all KV fits
    in compute memory is used, or else the last. `num_halvings`: out-of-memory errors so far; each halves the block.
    """
    shape, config = problem.shape, problem.config

    def counts(num_sequences: int) -> list[int]:
        """Returns the number of micro-batches for each width."""
        return list(dict.fromkeys(-(-num_sequences // width) for width in widths))

    def make_blocks(num_sequences: int, count: int) -> tuple[Block, ...]:
        return problem.blocks(-(-num_sequences // count), count)

    max_sequences = block_size(config.policy)
    if config.policy.kind is PolicyKind.fixed:
        *large, usual = counts(max_sequences)  # few large micro-batches, and the number for the last width
        for blocks in (make_blocks(max_sequences, count) for count in large):
            if chunk := _fitting_chunk(problem, least_memory_config(config), blocks, all_in_compute=True):
                return chunk, blocks
        blocks = make_blocks(max_sequences, usual)
        return chunk_sizes(shape, config.policy, blocks)[-1], blocks
    blocks: tuple[Block, ...] = ()
    largest = max(1, min(max_sequences, len(problem.sizes)) >> num_halvings)
    # Block sizes to try, descending: all sequences, 3/4, 1/2, 3/8 ... 1.
    sizes = {step for shift in range(largest.bit_length()) for step in (largest >> shift, 3 * largest >> shift + 2)}
    block_sizes = sorted(sizes - {0}, reverse=True)
    for tier in kv_tiers(shape, config, has_device=problem.budgets.has_device):
        tier_config = replace(least_memory_config(config), kv=replace(config.kv, tier=tier))
        for num_sequences in block_sizes:
            *large, usual = counts(num_sequences)
            for count in (*large, usual):
                blocks = make_blocks(num_sequences, count)
                if chunk := _fitting_chunk(problem, tier_config, blocks, all_in_compute=count != usual):
                    return chunk, blocks
    return chunk_sizes(shape, config.policy, blocks)[-1], blocks


def _fitting_chunk(
    problem: Problem, config: RuntimeConfig, blocks: tuple[Block, ...], *, all_in_compute: bool
) -> int | None:
    """Returns the first of the default chunks with which these blocks fit; None if there is none.

    With `all_in_compute`, the whole KV cache must fit in compute memory.
    """
    shape, budgets = problem.shape, problem.budgets
    for chunk in chunk_sizes(shape, config.policy, blocks):
        chunked = with_chunk_tokens(config, chunk)
        load = run_load(shape, chunked, budgets, blocks, problem.sizes)
        placement = choose_placement(shape, chunked, budgets, load) if load.has_enough_pages else None
        if placement is not None and placement.fits and (not all_in_compute or has_all_kv_in_compute(placement)):
            return chunk
    return None


def tune_chunks(problem: Problem, initial: PlacedRun) -> PlacedRun:
    """Returns the blocks of `initial` with larger prefill chunks if that is faster, otherwise `initial`.

    `initial` must have the smallest chunks. It stays as it is without rates, or if the chunk is configured.
    """
    if problem.rates is None or problem.config.policy.prefill_chunk_tokens is not None:
        return initial
    chosen = _best_chunk(problem, initial, problem.rates)
    while chosen > initial.chunk_tokens:
        run = problem.place_blocks(initial.blocks, chosen)
        if run.placement.fits:
            return run
        chosen //= 2
    return initial


def _best_chunk(problem: Problem, initial: PlacedRun, rates: MachineRates) -> int:
    """Returns the chunk with the shortest predicted time.

    The prediction is a rough one for the block that takes most memory, or with continuous admission for a few blocks.
    """
    best = chunk = initial.chunk_tokens
    max_tokens = max((pass_tokens(problem.shape, lane, UNLIMITED_TOKENS) for lane in initial.load.lanes), default=0)
    if chunk >= max_tokens:
        return best
    shares = {stage.num_experts_per_token / stage.num_experts for stage in problem.shape.layers if stage.num_experts}
    # Rates as functions of rows, with the share of a chunk's tokens that one such product multiplies.
    rate_shares = [(rates.gemm_rate, 1.0), *((rates.expert_rate, share) for share in shares)]
    fixed_seconds = len(initial.load.lanes) * len(initial.load.shape.stages) * rates.turn_seconds + rates.pass_seconds
    prediction, placement = shortest, shortest_placement = _predict_chunks(problem, initial, chunk, rates)
    while prediction is not None and shortest is not None and chunk < max_tokens:
        # Stalls and overheads do not grow with the chunk, so a larger chunk has less of both per token.
        prefill = prediction.prefill
        is_stalled = prefill.stall_seconds + prefill.num_passes * fixed_seconds > NOTABLE * prefill.seconds
        has_peak_rates = all(rate(2 * part * chunk) <= (1 + NOTABLE) * rate(part * chunk) for rate, part in rate_shares)
        if not is_stalled and has_peak_rates:
            break
        chunk *= 2
        prediction, placement = _predict_chunks(problem, initial, chunk, rates)
        if prediction is None or prediction.seconds >= shortest.seconds - MIN_SAVING * shortest.prefill_seconds:
            continue
        # A larger chunk may leave memory only for single experts.
        drops_layers = placement.num_kept_experts and len(placement.resident) < len(shortest_placement.resident)
        if not drops_layers or problem.favors_single(prediction, shortest):
            best, shortest, shortest_placement = chunk, prediction, placement
    return best


def _predict_chunks(
    problem: Problem, initial: PlacedRun, num_tokens: int, rates: MachineRates
) -> tuple[Prediction | None, Placement]:
    """Returns the prediction for chunks of `num_tokens`, None if they do not fit, and the placement."""
    if problem.config.policy.admission is Admission.continuous:
        run = problem.place_blocks(pick_evenly(initial.blocks, MAX_BLOCKS), num_tokens)
        return problem.predict(run) if run.placement.fits else None, run.placement
    load = Load.from_lanes(problem.shape, initial.load.lanes, num_tokens)  # of the block that takes most memory
    load = replace(
        initial.load,
        chunk_tokens=num_tokens,
        max_tokens=load.max_tokens,
        block_tokens=load.block_tokens,
        num_prefill_passes=load.num_prefill_passes,
    )
    placement = problem.choose_placement(
        replace(with_chunk_tokens(problem.config, num_tokens), prefetch=initial.prefetch), load
    )
    roughly = predict_roughly(problem.shape, placement, load.lanes, num_tokens, rates) if placement.fits else None
    return roughly, placement
