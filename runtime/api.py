"""The library's front door: `Runtime(config).generate(prompts)` is the same engine as the job, without Hydra."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from .batching.balance import Block
from .budgets import device_limited, require_within
from .config import Attention, PolicyKind, RuntimeConfig, SamplingOverrides
from .engine.engine import Engine
from .engine.requests import Rejected, make_request
from .engine.sampling.sampler import Sampler, sampler_for
from .engine.self_check.check import check_lanes, is_due
from .engine.sequence import Completion, Request
from .engine.setup import Setup, prepare_attention, prepare_kernels
from .engine.streams import open_streams
from .engine.tokens import tokenize
from .measure.machine_cache import Host, find_products
from .model.attention_way import placed
from .model.followed import as_the_model_says
from .model.loading import LoadedModel, load_model
from .opening import Opening
from .plan.cost.rates import MachineRates
from .plan.facts import PlanFacts
from .plan.placement.placement import Budgets
from .plan.placement.placer import kv_tiers
from .plan.planner import RunPlan
from .plan.search.policy import Policy
from .planning import Planner
from .session import Session
from .store.reader import Reader
from .stream.device import ComputeDevice
from .stream.host_memory import reset_peak, resident_bytes, set_allocator
from .trace import Trace
from .units import MIB, format_bytes

log = logging.getLogger(__name__)


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
        self._advised: set[str] = set()
        self._is_checked = False
        if not self.device.is_accelerator:
            self.model = replace(self.model, backends=find_products(self.host))
            prepare_kernels(self.model)
        elif self.config.policy.attention is Attention.cpu:
            prepare_attention(self.model)
        self.baseline_bytes = resident_bytes()  # interpreter, libraries, the model without weights: not in the budget
        reset_peak()

    def _refuse_early(self) -> None:
        """Refuses what cannot be by the settings and the model alone: before rows are read, not behind them."""
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
        """Token ids of each text; many at once take half the time. `is_rendered`: they came out of a chat template,
        which has put the special tokens in already."""
        return tokenize(self.model, texts, is_rendered=is_rendered)

    @property
    def planner(self) -> Planner:
        return Planner(model=self.model, config=self.config, device=self.device, open_reader=self.reader)

    @property
    def host(self) -> Host:
        """The machine that measured rates hold for."""
        return self.planner.host

    def budgets(self) -> Budgets:
        return self.planner.budgets

    def plan(
        self,
        requests: Sequence[Request],
        *,
        rates: MachineRates | None = None,
        blocks: tuple[Block, ...] | None = None,
        known: Policy | None = None,
        num_halvings: int = 0,
    ) -> RunPlan:
        """The plan of a run of these requests; see `Planner.plan`. `rates`: None measures them."""
        sizes = [request.size for request in requests]
        return self.planner.plan(sizes, rates=rates, blocks=blocks, known=known, num_halvings=num_halvings)

    def revised(self, plan: RunPlan, requests: Sequence[Request], rates: MachineRates) -> RunPlan:
        """`plan` as `rates` show it; see `Planner.revised`."""
        return self.planner.revised(plan, [request.size for request in requests], rates)

    def facts(self, plan: RunPlan) -> PlanFacts:
        return self.planner.facts(plan)

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
        num_bytes = self.model.shape.sizes.resident_bytes(plan.placement.resident)
        log.info("opening files, and reading %s of weights that stay in memory", format_bytes(num_bytes))
        begin = time.monotonic()
        with limit, self.reader() as reader, open_streams(setup, reader) as streams:
            engine = Engine(setup, streams, self._sampler(), self._should_stop)
            yield Session(self.model, engine, plan, plan.policy, opening_seconds=time.monotonic() - begin)

    def confirmed_session(
        self,
        requests: Sequence[Request],
        *,
        rates: MachineRates | None = None,
        blocks: tuple[Block, ...] | None = None,
        known: Policy | None = None,
    ) -> AbstractContextManager[tuple[RunPlan, Session]]:
        """Plans, as `plan` does, and opens a session. Unless the policy is fixed or there are `blocks` of an earlier
        start, the first pass of the heaviest block is tried; if memory runs out or the host budget is passed, once more
        with blocks of half the size.
        """
        kind = self.config.policy.kind
        may_back_off = blocks is None and kind is not PolicyKind.fixed

        def plan(rates: MachineRates | None, num_halvings: int) -> RunPlan:
            found = self.plan(requests, rates=rates, blocks=blocks, known=known, num_halvings=num_halvings)
            self.planner.announce(found, self._advised)
            self._check_lanes(found)
            return found

        def confirm(plan: RunPlan, session: Session) -> None:
            if may_back_off and plan.blocks:
                log.info("trying the first pass, whether memory suffices")
                session.probe(requests)
                self.require_within_budget(plan)

        opening = Opening(plan=plan, session=self.session, confirm=confirm, kind=kind, may_back_off=may_back_off)
        return opening.confirmed(rates)

    def _check_lanes(self, plan: RunPlan) -> None:
        """Compares lanes with the class itself where that is due: once, while no weights are held."""
        seconds = 0.0 if plan.prediction is None else plan.prediction.seconds
        if not self._is_checked and plan.blocks and is_due(self.model, self.config.model.self_check, seconds):
            check_lanes(self.model, self.config, self.budgets(), self.reader, self._should_stop)
            reset_peak()
        self._is_checked = True

    def generate(self, prompts: Sequence[str | Sequence[int]]) -> list[Completion | Rejected]:
        """`sampling.n` results per prompt, in order of prompts and then of samples: a completion, or why there is
        none."""
        made = [item for n, prompt in enumerate(prompts) for item in self.samples(self.request(str(n), prompt))]
        requests = [item for item in made if isinstance(item, Request)]
        results: dict[tuple[str, int], Completion | Rejected] = {i.key: i for i in made if isinstance(i, Rejected)}
        if requests:
            with self.confirmed_session(requests) as (_, session):
                results |= {requests[i].key: completion for i, completion in session.generate(requests)}
        return [results[item.key] for item in made]

    def reader(self) -> Reader:
        offload = self.config.offload
        return Reader(
            num_threads=offload.reader_threads, chunk_bytes=offload.read_chunk_mib * MIB, direct=offload.direct_io
        )
