"""The library's front door: `Runtime(model=...).generate(prompts)` is the same engine as the job, without Hydra."""

import gc
import logging
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import torch

from ..checkpoint_source.generation_config import resolve_generation_defaults
from ..closing import Closing
from ..config.profiles import DEFAULT_BACKENDS
from ..config.settings import (
    Attention,
    PolicyKind,
    Pooling,
    RuntimeConfig,
    SamplingOverrides,
    require_beams_fit,
)
from ..devices.messages import KIND, SESSION, end_sessions
from ..devices.sessions import RankSession
from ..devices.shared_run import SharedRun, choose_rank_device
from ..engine.batcher import sequence_sizes
from ..engine.compiling import COMPILING_SECONDS, MIN_TOKENS, CompiledKernels, estimate_plain_seconds
from ..engine.engine import Engine, agree_alone
from ..engine.self_check import check_lanes, is_check_due
from ..engine.session import Session
from ..engine.setup import Setup, compiled_kernels, open_streams, prepare_attention
from ..errors import ClosedError
from ..measure.contests import known_backends
from ..measure.machine_cache import Host, find_products
from ..model.head import slice_head
from ..model.loading import LoadedModel, load_model
from ..out_of_memory import first_line, is_out_of_memory, plan_memory_error, run_memory_error
from ..plan.cost.rates import MachineRates
from ..plan.placement.memory import SequenceSize
from ..plan.placement.placement import Budgets
from ..plan.placement.placer import kv_tiers
from ..plan.planner import RunPlan
from ..plan.resolved_settings import ResolvedSettings, why_unshared
from ..plan.shape.dtypes import keeping_kv
from ..plan.shape.model import ModelShape
from ..planning.budgets import device_limited, require_within
from ..planning.planner import Planner, PlanOptions, RuntimeCache
from ..probing.heads import Head
from ..ranks.ranks import Ranks
from ..requests.encoding import require_text
from ..requests.prompts import Rejected, make_request, tokenize
from ..sequences.grammar import resolve_schema
from ..sequences.sampler import Sampler, make_sampler
from ..sequences.sequence import Completion, Request
from ..store.reader import Reader
from ..stream.device import ComputeDevice
from ..stream.filling import SessionResources
from ..stream.host_memory import reset_peak, resident_bytes, set_allocator, trim_heap
from ..trace import Trace
from ..units import MIB, format_bytes
from .encoding import CLASSIFICATION_TASK, Classified, Embedded, Filled, embedding_task, mask_filling_task
from .generation import CompletionStream, GenerationTask, Result, repeat_samples
from .keywords import Settings, apply_settings
from .prompt import PromptLike
from .scoring import Scored, ScoredDocument, ScoringTask, TargetsLike, score_documents
from .task import ResultStream, RuntimeTask, require_iterable

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)
L = TypeVar("L")
V = TypeVar("V")
T = TypeVar("T")


class Runtime(Closing):
    """Opens a model without reading its weights. `with Runtime(...) as runtime:` keeps weights that a call has read,
    its reader and what it measured for the calls that follow, until the end of the block; outside of one, or of `open`
    and `close`, each call reads them anew. With `sampling.follow_model`, `config.sampling` has the model's settings
    from then on.

    Settings are keywords, by their names in `Settings`, and change `config`, or its defaults. They are one TypedDict
    rather than parameters, so that a type checker sees each with its type, here and in a caller's own function that
    passes them on, and a name that does not exist is refused with the nearest one that does.

    `device`: None takes the one that `machine.device` names; a text is one such name. `trace` collects what ran when;
    somebody must take it as the run goes on. `ranks`: those of which this process is one; all make the same calls, and
    all are given all results. `encodes`: of an encoder-decoder its encoder alone is opened, to `embed`; any other model
    is opened as without. Not thread-safe. Raises ConfigError, CheckpointError or BudgetError with what to change.
    """

    def __init__(
        self,
        config: RuntimeConfig | None = None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        trace: Trace | None = None,
        device: ComputeDevice | str | None = None,
        ranks: Ranks | None = None,
        encodes: bool = False,
        **settings: Unpack[Settings],
    ):
        self.config = apply_settings(config, settings)
        self.config = replace(self.config, sampling=resolve_schema(self.config.sampling))
        self._should_stop, self.trace, self.ranks = should_stop, trace, ranks
        self._shared = None if ranks is None else SharedRun.from_ranks(ranks)
        if self._shared is not None:
            self.config = self._shared.rank_config(self.config)
        self._kept: RuntimeCache | None = None
        self._kernels: CompiledKernels | None = None
        self._shape_with_kernels: ModelShape | None = None  # while a run computes without
        self.baseline_bytes = 0
        self._is_closed = False
        self._latest: weakref.ref[ResultStream[Any]] | None = None
        name = device if isinstance(device, str) else self.config.machine.device
        self.device = device if isinstance(device, ComputeDevice) else choose_rank_device(ranks, name)
        if self.config.machine.num_threads is not None:
            torch.set_num_threads(self.config.machine.num_threads)
        if not self.device.is_accelerator:
            set_allocator(is_budget_hard=self.config.offload.host_memory_gib is not None)
        loaded = load_model(
            self.config.model,
            self.device.torch_device,
            self.config.offload.cache_dir,
            should_stop=should_stop,
            split=None if self._shared is None else self._shared.split,
            encodes=encodes,
        )
        loaded = replace(loaded, shape=keeping_kv(loaded.shape, self.config.kv.dtype))
        self.model: LoadedModel = loaded.placed(self.device)
        self.config = resolve_generation_defaults(self.config, loaded.generation, loaded.shape.vocab_size)
        # What cannot be by the settings and the model alone is refused before rows are read, not behind them.
        require_beams_fit(self.config.policy, self.config.sampling)
        kv_tiers(self.model.shape, self.config, has_device=self.device.is_accelerator)
        self._sampler()
        if self._shared is not None:
            self.model = self._shared.divide_model(self.model, self.config.offload, self.device)
        self._advised: set[str] = set()
        self._may_compare = False  # linear backends
        self._checked = set[bool]()  # runs without scores, and with
        if not self.device.is_accelerator:
            found = find_products(self.host)
            if self._shared is not None:
                found = self._shared.agree_on_backends(found)
            elif found is None:
                found, self._may_compare = known_backends(self.host), True
            self.model = replace(self.model, backends=found)
            self._kernels = compiled_kernels(self.model)
            if self._shared is not None:
                self.wait_for_kernels()  # ranks that compute the same come to the same bits
            elif estimate_plain_seconds(self.model.shape, [MIN_TOKENS]) > COMPILING_SECONDS:
                self._kernels.begin()
        elif self.config.policy.attention is Attention.cpu:
            prepare_attention(self.model)
        if self._shared is not None:
            self._shared.share_memory(self.config.offload, self.device)
        self.baseline_bytes = resident_bytes()  # interpreter, libraries, the model without weights: not in the budget
        reset_peak()

    def open(self) -> Self:
        """Keeps from now on what calls read and measure, until `close`: what `with` does at its begin."""
        self._require_open()
        if self._kept is None:
            self._kept = RuntimeCache(self.reader)
        return self

    def __enter__(self) -> Self:
        return self.open()

    def close(self) -> None:
        """Ends a stream that goes on, and frees weights, threads and files. No call is possible afterwards; closing
        again does nothing."""
        self._end_latest_stream("the end of its runtime")
        self._is_closed = True
        if self._kernels is not None:
            self._kernels.close()
        if self._kept is not None:
            self._kept.close()
            self._kept = None
            self._reclaim()

    def _reclaim(self) -> None:
        """Frees what ended sessions held: an engine refers to itself."""
        gc.collect()
        self.device.empty_caches()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this runtime is closed: make another, or call it inside its `with` block")

    def _end_latest_stream(self, by: str) -> None:
        stream = self._latest() if self._latest is not None else None
        if stream is not None:
            stream.end(by)

    def _sampler(self) -> Sampler:
        return make_sampler(self.model, self.config.sampling, self.device.torch_device)

    def request(
        self, id: str, prompt: str | Sequence[int], *, overrides: SamplingOverrides | None = None
    ) -> Request | Rejected:
        """Tokenises a prompt with the tokenizer's own special tokens and fits the answer into the context."""
        return make_request(self.model, self.config.sampling, id, prompt, overrides or SamplingOverrides())

    def samples(self, made: Request | Rejected, count: int | None = None) -> list[Request | Rejected]:
        """`count` times the same, each with its `sample_index`; None is `sampling.n` times."""
        return repeat_samples(made, self.config.sampling.n if count is None else count)

    def tokenize(self, texts: Sequence[str], *, is_rendered: bool = False) -> list[tuple[int, ...]]:
        """Token ids of each text; many at once take half the time. `is_rendered`: they came out of a chat template,
        which has put the special tokens in already."""
        return tokenize(self.model, texts, is_rendered=is_rendered)

    @property
    def planner(self) -> Planner:
        self._require_open()
        return Planner(
            model=self.model,
            config=self.config,
            device=self.device,
            open_reader=self.reader,
            kept=self._kept,
            predicts=self.ranks is None,
            given_budgets=None if self._shared is None else self._shared.budgets,
            compares=self._may_compare,
        )

    @property
    def host(self) -> Host:
        """The machine that measured rates hold for."""
        return self.planner.host

    def budgets(self) -> Budgets:
        return self.planner.budgets

    def wait_for_kernels(self) -> None:
        """Waits until the kernels of a model on the CPU are compiled, even for a run that would be done sooner without:
        for whoever times one. Raises Interrupted."""
        if self._kernels is None or self._kernels.are_ready:
            return
        before = resident_bytes()
        self._kernels.wait(self._should_stop)
        self.baseline_bytes += resident_bytes() - before
        if self._shape_with_kernels is not None:
            self.model = replace(self.model, shape=self._shape_with_kernels)
            self._shape_with_kernels = None
            self._checked.clear()  # what was compared with the class were plain operators, and so was what was measured
            if self._kept is not None:
                self._kept.forget_rates()

    def _starts_without_kernels(self, requests: Sequence[Request]) -> bool:
        """Whether the session of these requests computes in plain operators, which is then planned for."""
        if self._kernels is None or self._kernels.are_ready:
            return False
        shape, tokens = self.model.shape, [request.size.capacity_tokens for request in requests]
        if not self._kernels.use_plain_operators(estimate_plain_seconds(shape, tokens)):
            return False
        self._shape_with_kernels = self._shape_with_kernels or shape
        self.model = replace(self.model, shape=replace(shape, has_decode_kernel=False, has_fused_gates=False))
        return True

    def plan(self, requests: Sequence[Request], **options: Unpack[PlanOptions]) -> RunPlan:
        """The plan of a run of these requests, by keywords as in `PlanOptions`. Sessions multiply from now on as the
        plan says."""
        if self._shape_with_kernels is None:
            self.wait_for_kernels()
        plan = self.planner.plan(self.sizes(requests), **options)
        if plan.backends is not None and plan.backends != (self.model.backends or DEFAULT_BACKENDS):
            self.model = replace(self.model, backends=plan.backends)
            self._may_compare = False
        return plan

    def revised(self, plan: RunPlan, requests: Sequence[Request], rates: MachineRates) -> RunPlan:
        """`plan` as `rates` show it; see `Planner.revised`."""
        return self.planner.revised(plan, self.sizes(requests), rates)

    def sizes(self, requests: Sequence[Request]) -> list[SequenceSize]:
        """What a plan asks of all requests of a run, with what they share where they may."""
        has_lengths = self.model.rope_lengths is not None
        if why_unshared(self.config, self.model.shape, has_rope_lengths=has_lengths) is None:
            return sequence_sizes(requests)
        return [request.size for request in requests]

    def resolved_settings(self, plan: RunPlan) -> ResolvedSettings:
        return self.planner.resolved_settings(plan)

    def require_within_budget(self, plan: RunPlan) -> None:
        """Raises MemoryError when this process has used more host memory than planned for, above its own baseline."""
        require_within(plan.placement, self.baseline_bytes, self.device.num_sharers)

    @contextmanager
    def session(self, plan: RunPlan, resources: SessionResources | None = None) -> Iterator[Session]:
        """Holds the weights, the slots and the reader threads; an open runtime keeps the first and the last.
        `together`: what ranks have in common that read weights together, which keep nothing."""
        self._require_open()
        if self._shape_with_kernels is None:
            self.wait_for_kernels()
        kept = self._kept.weights if self._kept is not None and resources is None else None
        setup = Setup(
            model=self.model,
            config=replace(self.config, policy=plan.policy),
            placement=plan.placement,
            device=self.device,
            trace=self.trace,
            kept=kept,
            resources=resources,
        )
        limit = device_limited(self.config.offload, self.device, kept)
        num_bytes = self.model.shape.sizes.resident_bytes(plan.placement.resident)
        where = ", where they are not there already" if kept is not None and kept.compute_bytes else ""
        log.info("opening files, and reading %s of weights that stay in memory%s", format_bytes(num_bytes), where)
        begin = time.monotonic()
        common = nullcontext() if resources is None else resources
        with limit, self._session_reader() as reader, common, open_streams(setup, reader) as streams:
            sampler, shared = self._sampler(), self._shared
            rank_sync = None if shared is None else shared.rank_sync(self._should_stop)
            engine = Engine(
                setup,
                streams,
                sampler,
                self._should_stop if rank_sync is None else rank_sync.should_stop,
                agree_alone if rank_sync is None else rank_sync.agree_on_lanes,
                None if shared is None else shared.line,
            )
            seconds, reasoning = time.monotonic() - begin, sampler.reasoning
            if self.model.rounded is not None:
                log.info("weights were rounded while they were read: %s", self.model.numbers)
            if shared is None or rank_sync is None:
                yield Session(self.model, engine, plan, plan.policy, opening_seconds=seconds, reasoning=reasoning)
            else:
                yield shared.session_kind(
                    self.model, engine, plan, opening_seconds=seconds, reasoning=reasoning, rank_sync=rank_sync
                )

    @contextmanager
    def _session_reader(self) -> Iterator[Reader]:
        """The reader that is kept, or one of its own. A session that fails may have left reads behind, and ends it."""
        if self._kept is None:
            with self.reader() as reader:
                yield reader
            return
        try:
            yield self._kept.reader()
        except GeneratorExit:
            raise
        except BaseException:
            self._kept.close_reader()
            raise

    @contextmanager
    def open_with_backoff(
        self, requests: Sequence[Request], **options: Unpack[PlanOptions]
    ) -> Iterator[tuple[RunPlan, Session]]:
        """Plans, as `plan` does, and opens a session. Unless the policy is fixed or there are `blocks` of an earlier
        start, the first pass of the heaviest block is tried; if memory runs out or the host budget is passed, once more
        with blocks of half the size. Where kernels are yet to be compiled, it waits for them, or computes without if
        that is done sooner. Raises BudgetError where memory does not suffice for the last plan either, and
        MemoryShortage where it runs out later on. Of ranks this is what rank 0 calls; the others `follow`.
        """
        self._prepare_model(requests)
        blocks = options.get("blocks")
        if self._shared is not None:
            told = self._shared.plan(self.planner, requests, blocks, options.get("chunk_tokens"))
            plan = self._shared.plan_from_broadcast(told, self.planner, requests)
            self._check_lanes(plan, requests)
            reset_peak()
            together = self._shared.begin(told)
            self.planner.announce(plan, self._advised)
            with self.session(plan, together) as session:
                assert isinstance(session, RankSession)
                yield plan, session
                session.announce_close()
            return
        if not self._starts_without_kernels(requests):
            self.wait_for_kernels()
        kind = self.config.policy.kind
        may_back_off = blocks is None and kind is not PolicyKind.fixed
        for num_halvings in range(2):
            if num_halvings:
                gc.collect()  # the engine of the first try refers to itself
                reset_peak()
            plan = self.plan(requests, **(options | {"num_halvings": num_halvings}))
            options["rates"] = plan.rates
            self.planner.announce(plan, self._advised)
            self._check_lanes(plan, requests)
            # Memory is counted from what the process holds now: what measuring, the self-check, compiled kernels and a
            # first try left behind is not the run's. Kept weights are, and were allocated behind an earlier beginning,
            # which then stays.
            if self._kept is None or not (self._kept.weights.compute_bytes or self._kept.weights.pinned_bytes):
                trim_heap()
                self.baseline_bytes = resident_bytes()
            reset_peak()
            with ExitStack() as stack:
                session: Session | None = None
                try:
                    session = stack.enter_context(self.session(plan))
                    if may_back_off and plan.blocks:
                        log.info("trying the first pass, whether memory suffices")
                        session.probe(requests)
                        self.require_within_budget(plan)
                except (MemoryError, OSError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    if num_halvings or not may_back_off:
                        raise plan_memory_error(plan.placement.ledgers, error) from error
                    reason = first_line(error)  # a record of the log would keep the error, and all that its frames hold
                    log.warning("policy=%s: %s; once more with blocks of half as many sequences", kind.value, reason)
                    session = None  # so that its memory is free as the stack closes
                if session is None:
                    continue
                try:
                    yield plan, session
                except (MemoryError, OSError, RuntimeError) as error:
                    if is_out_of_memory(error):
                        raise run_memory_error(plan.placement.ledgers, error) from error
                    raise
                return

    def _prepare_model(self, requests: Sequence[Request]) -> None:
        """Mutates the model, where they ask for more than the next token. Raises ConfigError where it, or ranks, cannot
        do so."""
        if self._shared is not None:
            self._shared.require_broadcastable(requests)
        if any(request.encoding is None for request in requests):
            require_text(self.model)
        if any(request.scoring is not None for request in requests) or (
            self.model.head is not Head.none and any(request.encoding is not None for request in requests)
        ):
            slice_head(self.model.staged)

    def follow(self, requests: Sequence[Request]) -> Generator[tuple[int, Completion]]:
        """Takes part, as another rank than 0, in each session that rank 0 opens for these requests, until it says that
        there will be no other; gives what all ranks come to, with places in `requests`. Raises Interrupted, PeerEnded,
        ConfigError."""
        shared = self._shared
        assert shared is not None, "there is nobody to follow"
        self._prepare_model(requests)
        while (message := shared.ranks.receive())[KIND] == SESSION:
            plan = shared.plan_from_broadcast(message["plan"], self.planner, requests)
            with self.session(plan, shared.join(message)) as session:
                assert isinstance(session, RankSession)
                yield from session.follow(requests)

    def _check_lanes(self, plan: RunPlan, requests: Sequence[Request]) -> None:
        """Compares lanes with the class itself where that is due: once, and once more at the first scores, while no
        weights are held. Of a part of every matrix there is no other way to compute it."""
        seconds = 0.0 if plan.prediction is None else plan.prediction.seconds
        whole = self.model.shape if self._shared is None else self._shared.full_shape(self.model.shape)
        scores = any(request.scoring is not None for request in requests)
        is_first = whole is not None and scores not in self._checked
        if is_first and plan.blocks and is_check_due(self.model, self.config.model.self_check, seconds):
            config, stop = self.config, self._should_stop
            check_lanes(replace(self.model, shape=whole), config, self.budgets(), self.reader, stop, scores=scores)
            gc.collect()  # a model refers to itself
        self._checked |= {scores, False}

    def generate(self, prompts: Iterable[PromptLike]) -> list[Result]:
        """`sampling.n` results per prompt, in order of prompts and then of samples. `prompts` as for `stream`."""
        return self._collect(GenerationTask(sampling=self.config.sampling), prompts)

    def stream(self, prompts: Iterable[PromptLike], *, window: int | None = None) -> CompletionStream:
        """Completions as they finish, `sampling.n` for each prompt; what cannot be generated from comes first, with its
        `error`. A prompt is a text, token ids, messages of a chat, or a `Prompt`.

        All prompts are read before the first is generated from, since they are planned together. With a `window` they
        are read, planned and generated so many at a time, from an iterator that need not end; weights are kept from one
        window to the next. Work begins with the first item that is asked for. One stream goes on at a time: the next
        call ends it. Raises ConfigError at once where `prompts` is one text; later what `plan` and sessions raise, and
        the runtime stays usable.
        """
        return self._stream(GenerationTask(sampling=self.config.sampling), prompts, window)

    def generate_table(
        self,
        table: "pa.Table",
        *,
        prompt: str = "prompt",
        id: str | None = None,
        overrides: Mapping[str, str] | None = None,
        prefix: str = "",
    ) -> "pa.Table":
        """`table` with what comes behind each row's prompt: its columns and rows as they are, and the columns of
        `runtime.columns` behind them. A row without a usable prompt has `status` error, and says why in `error`.

        `prompt` is a column of texts, of lists of token ids, or of lists of messages. `id`: of the ids that draws
        follow from, each once; None: a row's place. `overrides`: columns by what a row asks for itself, as in `Prompt`.
        `prefix` stands before the names of added columns. Raises ConfigError where the table has no such columns, or
        has those of results; else as `stream`.
        """
        from .tables import TableColumns  # pyarrow, which nothing else of the library needs

        columns = TableColumns(prompt=prompt, id=id, overrides=overrides or {}, prefix=prefix)
        return columns.generate_results(table, self.config.sampling, self.generate)

    def score(self, pairs: Iterable[TargetsLike]) -> list[Scored]:
        """The log-probability of each target behind its prompt, in order of pairs and then of targets. `pairs` as for
        `score_stream`."""
        return self._collect(ScoringTask(), pairs)

    def score_stream(self, pairs: Iterable[TargetsLike], *, window: int | None = None) -> ResultStream[Scored]:
        """Scores of targets as their prompts are done; what cannot be scored comes first, with its `error`. A pair is
        `(prompt, target)`, `(prompt, [target, ...])` or `Targets`, a target a text or token ids. Nothing is generated.

        Targets that differ in their last token alone share one pass over the tokens before it. `window`, and what is
        raised, as for `stream`; ConfigError where the class's head is not apart from its layers.
        """
        return self._stream(ScoringTask(), pairs, window)

    def score_documents(
        self, documents: Iterable[str | Sequence[int]], *, max_tokens: int | None = None
    ) -> list[ScoredDocument]:
        """The rolling log-likelihood of each document, a text or token ids, in windows of `max_tokens`; None: of the
        model's context. Raises what `score` raises."""
        require_iterable(documents, None)
        return score_documents(self.model, documents, max_tokens, self.score)

    def embed(
        self, prompts: Iterable[PromptLike], *, pooling: str | Pooling | None = None, normalize: bool = False
    ) -> list[Embedded]:
        """A vector for each prompt, in their order; `embed_stream` says of what."""
        return self._collect(embedding_task(pooling, normalize=normalize), prompts)

    def embed_stream(
        self,
        prompts: Iterable[PromptLike],
        *,
        pooling: str | Pooling | None = None,
        normalize: bool = False,
        window: int | None = None,
    ) -> ResultStream[Embedded]:
        """Vectors as their prompts are done; what has none comes first, with its `error`. Each is made of the hidden
        states behind the model's last norm: `last` that of the last token, `cls` of the first, `mean` of all; None: as
        the checkpoint says, else `mean` of an encoder and `last` of a decoder. `normalize`: of length 1.

        `prompts`, `window` and what is raised as for `stream`; texts get the tokenizer's special tokens.
        """
        return self._stream(embedding_task(pooling, normalize=normalize), prompts, window)

    def classify(self, prompts: Iterable[PromptLike]) -> list[Classified]:
        """What a `*ForSequenceClassification` checkpoint says of each prompt, in their order."""
        return self._collect(CLASSIFICATION_TASK, prompts)

    def classify_stream(self, prompts: Iterable[PromptLike], *, window: int | None = None) -> ResultStream[Classified]:
        """Classes, or rewards, as their prompts are done; otherwise as `embed_stream`."""
        return self._stream(CLASSIFICATION_TASK, prompts, window)

    def fill_masks(self, prompts: Iterable[PromptLike], *, num_top: int = 5) -> list[Filled]:
        """What fits the masks of each prompt, in their order, of a `*ForMaskedLM` checkpoint."""
        return self._collect(mask_filling_task(self.model, num_top), prompts)

    def fill_masks_stream(
        self, prompts: Iterable[PromptLike], *, num_top: int = 5, window: int | None = None
    ) -> ResultStream[Filled]:
        """The `num_top` likeliest tokens in place of each mask, as their prompts are done; otherwise as
        `embed_stream`."""
        return self._stream(mask_filling_task(self.model, num_top), prompts, window)

    def _collect(self, task: RuntimeTask[L, V, T], values: Iterable[L]) -> list[T]:
        with self._stream(task, values, None) as stream:
            return sorted(stream, key=attrgetter(*task.sort_keys))

    def _stream(self, task: RuntimeTask[L, V, T], values: Iterable[L], window: int | None) -> ResultStream[T]:
        self._require_open()
        require_iterable(values, window)
        task.require_supported(self.model)
        self._end_latest_stream("a later call")
        stream = ResultStream(self._results(task, values, window))
        self._latest = weakref.ref(stream)
        return stream

    def _results(self, task: RuntimeTask[L, V, T], values: Iterable[L], window: int | None) -> Generator[T]:
        """What `task` gives, one window after the other, between which weights are kept."""
        with ExitStack() as stack:
            if window is not None and self._kept is None:
                self._kept = stack.enter_context(RuntimeCache(self.reader))
                stack.callback(setattr, self, "_kept", None)
            for inputs in task.windows(values, window):
                try:
                    yield from task.results(self.model, inputs, self._completions)
                finally:
                    if self._kept is not None:
                        self._reclaim()

    def _completions(self, requests: Sequence[Request]) -> Generator[tuple[int, Completion]]:
        if not requests:
            return
        if self._kept is not None:
            reset_peak()  # of earlier calls, whose budget may have been another
        if self.ranks is not None and self.ranks.rank:
            yield from self.follow(requests)
            return
        with self.open_with_backoff(requests) as (_, session), closing(session.generate(requests)) as completions:
            yield from completions
        if self.ranks is not None:
            end_sessions(self.ranks)

    def reader(self) -> Reader:
        offload = self.config.offload
        return Reader(
            num_threads=offload.reader_threads,
            chunk_bytes=offload.read_chunk_mib * MIB,
            direct=offload.direct_io,
            virtual_files=self.model.made,
        )
