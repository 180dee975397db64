"""Plans runs on this machine: measures missing rates, and reuses a cached policy or searches for a new one.

A policy is what a search chooses: sizes of blocks and micro-batches, placement of weights and KV, order of steps. A
block is the micro-batches that are decoded together. A session is one run of an open runtime. A linear backend is an
implementation of products with stored weights.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import torch

from ..batching.balance import Block
from ..closing import Closing
from ..config.profiles import DEFAULT_BACKENDS, BackendTable
from ..config.settings import PolicyKind, RuntimeConfig
from ..errors import BudgetError
from ..kernels.compiler import has_compiler
from ..measure.calibrate import measure_rates
from ..measure.contests import compare_backends
from ..measure.machine import device_name
from ..measure.machine_cache import Host, current_host
from ..model.loading import LoadedModel
from ..plan.cost.calibration import TypicalLoad
from ..plan.cost.predict import predict
from ..plan.cost.rates import MachineRates
from ..plan.placement.defaults import chunk_tokens, with_chunk_tokens
from ..plan.placement.experts import Routing
from ..plan.placement.memory import SequenceSize
from ..plan.placement.placement import Budgets
from ..plan.placement.run_load import block_lanes
from ..plan.plan_warnings import plan_warnings
from ..plan.planner import RunPlan, find_policy, plan_policy, plan_run
from ..plan.resolved_settings import ResolvedSettings
from ..plan.schedule.schedule import require_slots
from ..plan.search.candidate import Problem
from ..plan.search.policy import Policy
from ..store.reader import Reader
from ..stream.device import ComputeDevice
from ..stream.weight_cache import WeightCache
from ..units import MIB
from .budgets import make_budgets, reclaim_device_memory
from .policy_cache import plan_with_cached_policy, policies_directory, search_key


class RuntimeCache(Closing):
    """Weights, reader of weights and measured rates that a runtime keeps between sessions. `open_reader` opens the
    reader, also again after `close_reader`."""

    def __init__(self, open_reader: Callable[[], Reader]):
        self.weights = WeightCache()
        self._open_reader = open_reader
        self._reader: Reader | None = None
        # Rates, each with the load, the stages with paged experts, and the backends for which they were measured.
        self._rates: list[tuple[TypicalLoad, frozenset[int], BackendTable, MachineRates]] = []

    def close(self) -> None:
        self.close_reader()
        self.weights.clear()

    def reader(self) -> Reader:
        """Returns the open reader, which the caller must not close."""
        if self._reader is None:
            self._reader = self._open_reader()
        return self._reader

    def close_reader(self) -> None:
        """Closes the reader; the next `reader` call opens another."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def rates(self, load: TypicalLoad, paged: frozenset[int], backends: BackendTable) -> MachineRates | None:
        """Returns rates that were measured for the same `paged` stages and `backends`, and for a load that covers
        `load` (see `TypicalLoad.covers`); None if there are none."""
        for measured_load, *others, rates in self._rates:
            if others == [paged, backends] and measured_load.covers(load):
                return rates
        return None

    def add_rates(self, load: TypicalLoad, paged: frozenset[int], backends: BackendTable, rates: MachineRates) -> None:
        self._rates.append((load, paged, backends, rates))

    def clear_rates(self) -> None:
        """Drops all rates, because the computation that they were measured for has changed."""
        self._rates.clear()


log = logging.getLogger(__name__)

MEASURED_LAYERS, MEASURING_BYTES = 4, 256 * MIB  # most memory that a measurement allocates: these layers plus bytes
COMPARED_SECONDS = 10.0  # backends are compared if a run's products take at least this long
WORTHWHILE = 0.05  # share of a run's time that a new policy must save to be used: predictions are not more accurate


class PlanOptions(TypedDict, total=False):
    """Optional inputs of a plan that are known before it is made. None means the same as an omitted key."""

    rates: MachineRates | None  # measured if omitted
    blocks: tuple[Block, ...] | None  # blocks of a resumed run
    known: Policy | None  # policy of an earlier search, used if it fits
    chunk_tokens: int | None  # prefill chunk of a resumed run, used if it fits
    backends: BackendTable | None  # linear backends of a resumed run
    num_halvings: int  # as for `plan_policy`
    routing: Routing | None  # hits of experts that an earlier session of the run has counted


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Makes the plans of one runtime. Methods raise ConfigError or BudgetError before they read weights.

    `open_reader`: opens a reader of the weights, for measuring. `cache`: what an open runtime keeps between sessions.
    `measures_rates`: whether to measure missing rates. `fixed_budgets`: budgets to use instead of this machine's.
    `compares_backends`: whether to compare linear backends for long runs, if `jobs.measure` was not used.
    """

    model: LoadedModel
    config: RuntimeConfig
    device: ComputeDevice
    open_reader: Callable[[], Reader]
    cache: RuntimeCache | None = None
    measures_rates: bool = True
    fixed_budgets: Budgets | None = None
    compares_backends: bool = False

    @property
    def host(self) -> Host:
        """This machine, as the key of measured rates."""
        return current_host(device_name(self.device), torch.get_num_threads())

    @property
    def budgets(self) -> Budgets:
        """The memory budgets; if not configured, a share of the memory that is free now."""
        if self.fixed_budgets is not None:
            return self.fixed_budgets
        return make_budgets(self.config.offload, self.device, self.cache.weights if self.cache is not None else None)

    def plan(self, sizes: Sequence[SequenceSize], **options: Unpack[PlanOptions]) -> RunPlan:
        """Returns the plan for requests of these sizes. `options`: see `PlanOptions`."""
        # Fixes options of a resumed run in the model or the configuration, and plans again without these options.
        if (backends := options.get("backends")) is not None:
            resumed = replace(self, model=replace(self.model, backends=backends), compares_backends=False)
            return resumed.plan(sizes, **(options | {"backends": None}))
        chunk_tokens = options.get("chunk_tokens")
        if chunk_tokens is not None and self.config.policy.prefill_chunk_tokens is None:
            resumed = replace(self, config=with_chunk_tokens(self.config, chunk_tokens))
            try:
                return resumed.plan(sizes, **(options | {"chunk_tokens": None}))
            except BudgetError:
                log.warning(
                    "the run began with prefill chunks of %d tokens, which no longer fit: remaining outputs may "
                    "differ in their last bits from those of an uninterrupted run",
                    chunk_tokens,
                )
        reclaim_device_memory(self.device)
        budgets, blocks, num_halvings = self.budgets, options.get("blocks"), options.get("num_halvings", 0)
        initial = plan_run(self.model.shape, self.config, budgets, sizes, blocks=blocks, num_halvings=num_halvings)
        for walk in (initial.placement.walk, initial.placement.decode_walk):
            require_slots(walk, initial.num_lanes)
        rates = options.get("rates")
        if rates is None and sizes and self.measures_rates:
            rates = self.measure(initial, sizes)
        problem = Problem(
            shape=self.model.shape,
            config=self.config,
            budgets=budgets,
            sizes=sizes,
            rates=rates,
            routing=options.get("routing"),
        )
        table = self._compare_backends(initial, sizes, rates) if self.compares_backends and rates is not None else None
        if table is not None:
            return self.plan(sizes, **(options | {"backends": table, "chunk_tokens": None}))
        if self.config.policy.kind is PolicyKind.fixed or not sizes:
            fixed_blocks = blocks if budgets.has_device else initial.blocks
            plan = plan_policy(problem, blocks=fixed_blocks, num_halvings=num_halvings)
        else:
            machine = f"{self.config.machine.name} {self.host}{'' if has_compiler() else ' in plain operators'}"
            key = search_key(machine, self.model.shape, self.config, budgets, sizes)
            plan = plan_with_cached_policy(
                policies_directory(self.config.offload.cache_dir),
                key if blocks is None else None,
                problem,
                blocks=blocks,
                num_halvings=num_halvings,
                previous=options.get("known"),
            )
        return replace(plan, backends=None if self.device.is_accelerator else self._backends)

    @property
    def _backends(self) -> BackendTable:
        return self.model.backends or DEFAULT_BACKENDS

    def _compare_backends(
        self, plan: RunPlan, sizes: Sequence[SequenceSize], rates: MachineRates
    ) -> BackendTable | None:
        """Returns a table of the fastest linear backends, compared for the sizes of `plan`; None if it equals the table
        in use, or if the run is too short for a comparison."""
        num_tokens = sum(size.num_prompt_tokens + size.max_new_tokens for size in sizes)
        flops = num_tokens * sum(stage.flops_per_token for stage in self.model.shape.stages)
        fastest = max([*rates.gemm_flops_per_second.values(), *rates.expert_flops_per_second.values()])
        if flops < COMPARED_SECONDS * fastest or not has_compiler():
            return None
        load = TypicalLoad.from_lanes(self.model.shape, block_lanes(plan.blocks[0], sizes), chunk_tokens(plan.policy))
        fastest_table = compare_backends(self.model, self.host, load)
        return fastest_table if fastest_table != self._backends else None

    def measure(self, plan: RunPlan, sizes: Sequence[SequenceSize]) -> MachineRates:
        """Returns this machine's rates for passes of the sizes in `plan`. Measures them in about a second, unless
        cached ones cover these sizes."""
        lanes = block_lanes(plan.blocks[0], sizes)
        load, paged = TypicalLoad.from_lanes(self.model.shape, lanes, chunk_tokens(plan.policy)), plan.placement.paged
        if self.cache is not None:
            if (cached_rates := self.cache.rates(load, paged, self._backends)) is not None:
                return cached_rates
            layer_bytes = max(self.model.shape.sizes.slot_bytes(paged))
            self.cache.weights.ensure_free(MEASURED_LAYERS * layer_bytes + MEASURING_BYTES, plan.budgets)
        log.info("measuring this machine to predict the run's time")
        with self.open_reader() as reader:
            rates = measure_rates(self.model, reader, self.device, load, paged)
        if self.cache is not None:
            self.cache.add_rates(load, paged, self._backends, rates)
        return rates

    def revise(
        self, plan: RunPlan, sizes: Sequence[SequenceSize], rates: MachineRates, routing: Routing | None = None
    ) -> RunPlan:
        """Returns a plan for `rates` and `routing`, measured while `plan` runs. It has a newly searched policy, or
        keeps experts in place of layers, if this saves the share `WORTHWHILE` of the run's time; otherwise it follows
        `plan`. Blocks and budgets stay the same, because the session has already allocated its memory."""
        problem = Problem(
            shape=self.model.shape,
            config=self.config,
            budgets=plan.budgets,
            sizes=sizes,
            rates=rates,
            routing=routing,
        )
        policy = replace(plan.policy, draft_tokens=self.config.policy.draft_tokens)  # planned anew
        same_policy = replace(problem, config=replace(self.config, policy=policy, kv=plan.kv))
        current, searched = plan_policy(same_policy, blocks=plan.blocks), find_policy(problem, blocks=plan.blocks)
        assert current.prediction is not None, "rates are given"
        if current.placement.paged != plan.placement.paged and current.blocks == plan.blocks:
            placement = replace(plan.placement, routing=routing)
            chunk, admission = chunk_tokens(plan.policy), plan.policy.admission
            same = predict(self.model.shape, placement, plan.blocks, sizes, chunk, rates, admission)
            if current.prediction.seconds >= (1 - WORTHWHILE) * same.seconds:
                current = replace(current, placement=placement, prediction=same)
        assert current.prediction is not None, "rates are given"
        assert searched.prediction is not None, "rates are given"
        is_worth_it = searched.prediction.seconds < (1 - WORTHWHILE) * current.prediction.seconds
        if is_worth_it and searched.searched_policy is not None:
            return searched
        return replace(current, searched_policy=plan.searched_policy)

    def resolved_settings(self, plan: RunPlan) -> ResolvedSettings:
        """Returns the settings with which a run follows `plan`, with all defaults filled in."""
        dtype = str(self.model.compute_dtype).removeprefix("torch.")
        has_lengths = self.model.rope_lengths is not None
        return ResolvedSettings.from_plan(
            self.config,
            self.model.shape,
            plan,
            dtype=dtype,
            stored=self.model.weight_storage,
            has_rope_lengths=has_lengths,
        )

    def log_plan(self, plan: RunPlan, logged_warnings: set[str]) -> None:
        """Logs the plan and its memory in two lines, all of their details at debug level, and warnings. Adds warnings
        to `logged_warnings` and skips those in it."""
        settings, ledgers = self.resolved_settings(plan), plan.placement.ledgers
        log.info("plan: %s", settings.headline)
        log.info("memory: %s", ", ".join(ledger.headline for ledger in ledgers))
        for details in (settings, *ledgers):
            log.debug("%s", details)
        for warning in plan_warnings(self.config, self.model.shape, plan, has_device=self.device.is_accelerator):
            if warning not in logged_warnings:
                log.warning("%s", warning)
                logged_warnings.add(warning)
