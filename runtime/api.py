"""The library's front door: `Runtime(config).generate(prompts)` is the same engine as the job, without Hydra."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch

from .batching.balance import Block
from .budgets import budgets_of, device_limited, reclaim, require_within
from .choices import plan_by_choice, policies_directory, question
from .config import Admission, Attention, PolicyKind, RuntimeConfig, SamplingOverrides
from .engine.engine import Engine
from .engine.requests import Rejected, make_request
from .engine.sampling.sampler import Sampler, sampler_for
from .engine.self_check.check import check_lanes, is_due
from .engine.sequence import Completion, Request
from .engine.setup import Setup, prepare_attention, prepare_kernels
from .engine.streams import open_streams
from .engine.tokens import tokenize
from .first_try import opened
from .measure.calibrate import measure_rates
from .measure.machine import device_name
from .measure.machine_cache import Host, find_products, this_host
from .model.attention_way import placed
from .model.followed import as_the_model_says
from .model.loading import LoadedModel, load_model
from .out_of_memory import is_out_of_memory, memory_shortage
from .plan.advice import advice
from .plan.cost.rates import MachineRates
from .plan.cost.typical_load import Usual
from .plan.facts import PlanFacts
from .plan.placement.defaults import chunk_tokens
from .plan.placement.memory import SequenceSize
from .plan.placement.placement import Budgets
from .plan.placement.placer import kv_tiers
from .plan.placement.run_load import micro_batches_of
from .plan.planner import RunPlan, plan_run
from .plan.schedule.schedule import require_slots
from .plan.search.policy import Policy
from .session import Session
from .store.reader import Reader
from .stream.device import ComputeDevice
from .stream.host_memory import reset_peak, resident_bytes, set_allocator
from .trace import Trace
from .units import MIB

log = logging.getLogger(__name__)

WORTHWHILE = 0.05  # of a run's time, to be won by going another way: below it predictions say nothing


class Runtime:
    """Opens a model without reading its weights. Weights are held only inside `session`. With `sampling.follow_model`,
    `config.sampling` has the model's settings from then on.

    `device`: None takes the one that `machine.device` names. `trace` collects what ran when; somebody must take it as
    the run goes on. Not thread-safe. Raises ConfigError, CheckpointError or BudgetError with what to change.
    """

    def __init__(
        self,
        config: RuntimeConfig | None = None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        trace: Trace | None = None,
        device: ComputeDevice | None = None,
    ):
        self.config = config or RuntimeConfig()
        self._should_stop, self.trace = should_stop, trace
        self.device = device or ComputeDevice(self.config.machine.device)
        if self.config.machine.num_threads is not None:
            torch.set_num_threads(self.config.machine.num_threads)
        if not self.device.is_accelerator:
            set_allocator(is_budget_hard=self.config.offload.host_memory_gib is not None)
        loaded = load_model(
            self.config.model, self.device.torch_device, self.config.offload.cache_dir, should_stop=should_stop
        )
        self.model: LoadedModel = placed(loaded, self.device)
        self.config = as_the_model_says(self.config, self.model)
        self._refuse_early()
        self.rates: MachineRates | None = None  # of this run; None: `plan` measures them when it needs them
        self._advised: set[str] = set()
        self._is_checked = False
        if not self.device.is_accelerator:
            prepare_kernels(self.model, find_products(self.host))
        elif self.config.policy.attention is Attention.cpu:
            prepare_attention(self.model)
        self.baseline_bytes = resident_bytes()  # interpreter, libraries, the model without weights: not in the budget
        reset_peak()

    def _refuse_early(self) -> None:
        """What the settings and the model say already: before rows are read, not behind them."""
        kv_tiers(self.model.shape, self.config, has_device=self.device.is_accelerator)
        self._sampler()

    def _sampler(self) -> Sampler:
        return sampler_for(self.model, self.config.sampling, self.device.torch_device)

    def request(
        self, id: str, prompt: str | Sequence[int], *, overrides: SamplingOverrides | None = None
    ) -> Request | Rejected:
        """Tokenises a prompt with the tokenizer's own special tokens and fits the answer into the context."""
        return make_request(self.model, self.config.sampling, id, prompt, overrides or SamplingOverrides())

    def samples(self, made: Request | Rejected) -> list[Request | Rejected]:
        """`sampling.n` times the same, each with its `sample_index`."""
        return [made, *(replace(made, sample_index=index) for index in range(1, self.config.sampling.n))]

    def tokenize(self, texts: Sequence[str], *, is_rendered: bool = False) -> list[tuple[int, ...]]:
        """Many at once take half the time. `is_rendered`: they came out of a chat template, which has put the special
        tokens in already."""
        return tokenize(self.model, texts, is_rendered=is_rendered)

    def budgets(self) -> Budgets:
        return budgets_of(self.config.offload, self.device)

    def plan(
        self,
        requests: Sequence[Request],
        *,
        blocks: tuple[Block, ...] | None = None,
        known: Policy | None = None,
        num_halvings: int = 0,
    ) -> RunPlan:
        """`blocks`: of the run that is resumed; otherwise the policy chooses them. See `plan_run`. `known`: what a
        search came to before, which `policy=hrm` goes by as long as it fits. What cannot be is refused (ConfigError,
        BudgetError) before anything is read, also for measuring."""
        reclaim(self.device)
        sizes, budgets = [request.size for request in requests], self.budgets()
        first = plan_run(self.model.shape, self.config, budgets, sizes, blocks=blocks, num_halvings=num_halvings)
        for walk in (first.placement.walk, first.placement.decode_walk):
            require_slots(walk, first.num_lanes)
        if self.rates is None and requests:
            with self.reader() as reader:
                usual = self._usual(first, sizes)
                self.rates = measure_rates(self.model, reader, self.device, usual, first.placement.paged)
        if self.config.policy.kind is PolicyKind.hrm and requests:
            return self._plan_by_choice(sizes, budgets, blocks, known, num_halvings)
        kept, rates = blocks if budgets.has_device else first.blocks, self.rates
        return plan_run(
            self.model.shape, self.config, budgets, sizes, rates=rates, blocks=kept, num_halvings=num_halvings
        )

    def _plan_by_choice(
        self,
        sizes: Sequence[SequenceSize],
        budgets: Budgets,
        blocks: tuple[Block, ...] | None,
        known: Policy | None,
        num_halvings: int,
    ) -> RunPlan:
        shape = self.model.shape

        def plan(config: RuntimeConfig) -> RunPlan:
            return plan_run(shape, config, budgets, sizes, rates=self.rates, blocks=blocks, num_halvings=num_halvings)

        machine = f"{self.config.machine.name} {self.host}"
        return plan_by_choice(
            policies_directory(self.config.offload.cache_dir),
            question(machine, shape, self.config, budgets, sizes) if blocks is None else None,
            self.config,
            plan,
            has_device=budgets.has_device,
            num_halvings=num_halvings,
            known=known,
        )

    def revised(self, plan: RunPlan, requests: Sequence[Request], rates: MachineRates) -> RunPlan:
        """`plan` as `rates` show it: the way that a new search would go, if that promises less time by `WORTHWHILE`, or
        its own. Blocks stay what they are, and so do budgets: the memory that `plan`'s session holds is taken now."""
        sizes = [request.size for request in requests]

        def planned(config: RuntimeConfig) -> RunPlan:
            return plan_run(self.model.shape, config, plan.budgets, sizes, rates=rates, blocks=plan.blocks)

        same = planned(replace(self.config, policy=plan.policy, kv=plan.kv))
        found = planned(self.config)
        assert same.prediction is not None, "rates are given"
        assert found.prediction is not None, "rates are given"
        is_worth_it = found.prediction.seconds < (1 - WORTHWHILE) * same.prediction.seconds
        return found if is_worth_it else replace(same, searched=plan.searched)

    def facts(self, plan: RunPlan) -> PlanFacts:
        dtype = str(self.model.compute_dtype).removeprefix("torch.")
        return PlanFacts.of(self.config, self.model.shape, plan, dtype=dtype)

    def _usual(self, plan: RunPlan, sizes: Sequence[SequenceSize]) -> Usual:
        lanes = micro_batches_of(plan.blocks[0], sizes)
        return Usual.of(self.model.shape, lanes, chunk_tokens(plan.policy))

    @property
    def host(self) -> Host:
        """What measured rates hold for."""
        return this_host(device_name(self.device), torch.get_num_threads())

    def require_within_budget(self, plan: RunPlan) -> None:
        """Raises MemoryError when this process has used more host memory than planned for, above its own baseline."""
        require_within(plan.placement, self.baseline_bytes)

    @contextmanager
    def session(self, plan: RunPlan) -> Iterator[Session]:
        """Holds the weights, the slots and the reader threads."""
        setup = Setup(
            model=self.model,
            config=replace(self.config, policy=plan.policy),
            placement=plan.placement,
            device=self.device,
            trace=self.trace,
        )
        limit = device_limited(self.config.offload, self.device)
        with limit, self.reader() as reader, open_streams(setup, reader) as streams:
            engine = Engine(setup, streams, self._sampler(), self._should_stop)
            yield Session(self.model, engine, plan, plan.policy)

    @contextmanager
    def confirmed_session(
        self,
        requests: Sequence[Request],
        *,
        blocks: tuple[Block, ...] | None = None,
        known: Policy | None = None,
    ) -> Iterator[tuple[RunPlan, Session]]:
        """Plans, and opens a session. Unless the policy is fixed or there are `blocks` of an earlier start, the first
        pass of the heaviest block is tried; if memory runs out or the host budget is passed, once more with blocks of
        half the size.
        """
        may_back_off = blocks is None and self.config.policy.kind is not PolicyKind.fixed
        for num_halvings in range(2):
            if num_halvings:
                gc.collect()  # the engine of the first try refers to itself
                reset_peak()
            plan = self.plan(requests, blocks=blocks, known=known, num_halvings=num_halvings)
            self._announce(plan)
            self._check_lanes(plan)
            with ExitStack() as stack:
                confirm = partial(self._try, plan, requests if may_back_off and plan.blocks else None)
                may_fail = may_back_off and not num_halvings
                session = opened(stack, self.session(plan), confirm, plan, self.config.policy.kind, may_fail=may_fail)
                if session is None:
                    continue
                try:
                    yield plan, session
                except (MemoryError, OSError, RuntimeError) as error:
                    if is_out_of_memory(error):
                        raise memory_shortage(plan.placement.ledgers, error) from error
                    raise
                return

    def _try(self, plan: RunPlan, requests: Sequence[Request] | None, session: Session) -> None:
        if requests is not None:
            session.probe(requests)
            self.require_within_budget(plan)

    def _check_lanes(self, plan: RunPlan) -> None:
        """Once, while no weights are held."""
        seconds = 0.0 if plan.prediction is None else plan.prediction.seconds
        if not self._is_checked and plan.blocks and is_due(self.model, self.config.model.self_check, seconds):
            check_lanes(self.model, self.config, self.budgets(), self.reader, self._should_stop)
            reset_peak()
        self._is_checked = True

    def _announce(self, plan: RunPlan) -> None:
        """Before weights are read. What was advised once is not said again."""
        log.info("%s", self.facts(plan))
        for ledger in plan.placement.ledgers:
            log.info("%s", ledger)
        found = advice(self.config, self.model.shape, plan, has_device=self.device.is_accelerator)
        for sentence in found:
            if sentence not in self._advised:
                log.warning("%s", sentence)
        self._advised.update(found)

    def generate(self, prompts: Sequence[str | Sequence[int]]) -> list[Completion | Rejected]:
        """`sampling.n` results per prompt, in order of prompts and then of samples: a completion, or why there is
        none."""
        made = [item for n, prompt in enumerate(prompts) for item in self.samples(self.request(str(n), prompt))]
        requests = [item for item in made if isinstance(item, Request)]
        results: dict[tuple[str, int], Completion | Rejected] = {i.key: i for i in made if isinstance(i, Rejected)}
        if requests:
            with self.confirmed_session(requests) as (plan, session):
                results |= {c.request.key: c for c in self._completions(plan, session, requests)}
        return [results[item.key] for item in made]

    def _completions(self, plan: RunPlan, session: Session, requests: Sequence[Request]) -> Iterator[Completion]:
        if self.config.policy.admission is Admission.continuous:
            order = [i for block in plan.blocks for i in block.members]
            yield from (completion for _, completion in session.stream(order, requests, {}))
        else:
            for block in plan.blocks:
                yield from session.run(block, requests)

    def reader(self) -> Reader:
        offload = self.config.offload
        return Reader(
            num_threads=offload.reader_threads, chunk_bytes=offload.read_chunk_mib * MIB, direct=offload.direct_io
        )
