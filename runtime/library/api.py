"""`Runtime`, the Python API: `Runtime(model=...).generate(prompts)` runs the same engine as the jobs, without Hydra.

A session is the engine with weights, buffers and threads for one plan. A stage is the weights of one part of the
forward: embeddings, one decoder layer, or norm and head. A block is the micro-batches that are decoded together."""

import gc
import logging
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import torch

from ..cache_root import cache_root
from ..checkpoint_source.generation_config import resolve_generation_defaults
from ..closing import Closing
from ..config.profiles import DEFAULT_BACKENDS
from ..config.settings import (
    MTP,
    Attention,
    ModelConfig,
    PolicyKind,
    Pooling,
    RuntimeConfig,
    SamplingOverrides,
    SelfCheck,
    require_beams_fit,
)
from ..devices.messages import KIND, SESSION, end_sessions
from ..devices.sessions import RankSession
from ..devices.shared_run import SharedRun, choose_rank_device
from ..engine.batcher import sequence_sizes
from ..engine.compiling import COMPILING_SECONDS, MIN_TOKENS, CompiledKernels, estimate_plain_seconds
from ..engine.draft_model import DraftModel, open_draft_model, require_packed, require_same_tokens
from ..engine.engine import Engine, agree_alone
from ..engine.mtp_drafts import MtpDrafts
from ..engine.self_check import check_lanes, is_check_due
from ..engine.session import Session
from ..engine.setup import Setup, compiled_kernels, open_streams, prepare_attention
from ..errors import CheckpointError, ClosedError, ConfigError
from ..measure.contests import known_backends
from ..measure.machine_cache import Host, find_products
from ..model.head import slice_head
from ..model.loading import LoadedModel, load_model
from ..out_of_memory import first_line, is_out_of_memory, plan_memory_error, run_memory_error
from ..plan.cost.rates import MachineRates
from ..plan.placement.defaults import gather_tables
from ..plan.placement.experts import Routing
from ..plan.placement.memory import SequenceSize
from ..plan.placement.placement import Budgets
from ..plan.placement.placer import kv_tiers
from ..plan.planner import RunPlan
from ..plan.resolved_settings import ResolvedSettings, prefix_sharing_obstacle
from ..plan.search.drafts import draft_obstacle
from ..plan.shape.dtypes import with_kv_dtype
from ..plan.shape.model import ModelShape
from ..planning.budgets import limit_device_memory, make_budgets, require_within_budget
from ..planning.planner import Planner, PlanOptions, RuntimeCache
from ..probing.heads import Head
from ..ranks.ranks import Ranks
from ..requests.encoding import require_text
from ..requests.prompts import Rejected, make_request, tokenize
from ..sequences.grammar import resolve_schema
from ..sequences.sampler import Sampler, make_sampler
from ..sequences.sequence import Completion, Request
from ..store.file_digests import digest_files
from ..store.mirrors import Copies, find_copies
from ..store.reader import Reader
from ..stream.device import ComputeDevice
from ..stream.host_memory import reset_peak, resident_bytes, set_allocator, trim_heap
from ..stream.weight_cache import WeightCache
from ..stream.weight_reader import SessionResources
from ..trace import Trace
from ..units import GIB, MIB, format_bytes
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
LOGGED_BYTES = GIB  # reading more weights takes seconds, so it is logged
V = TypeVar("V")
T = TypeVar("T")


class Runtime(Closing):
    """A model and its engine. Construction reads no weights: each call reads them. Inside `with Runtime(...) as
    runtime:`, or between `open` and `close`, weights, reader and measured rates are kept for later calls. Not
    thread-safe. Raises ConfigError, CheckpointError or BudgetError with the setting to change.

    Keyword settings (see `Settings`) change `config`, or the default config. With `sampling.follow_model`, the
    attribute `config.sampling` contains the model's settings after construction.

    `device`: a device, or a name as in `machine.device`, which is the default. `trace`: collects time spans; the caller
    must call its `take` during the run, since it keeps all spans. `ranks`: the communication of this process with the
    others that compute the run; all must make the same calls, and all get all results. `encodes`: loads only the
    encoder of an encoder-decoder, for `embed`. `is_mtp_head`: loads only the checkpoint's MTP head."""

    def __init__(
        self,
        config: RuntimeConfig | None = None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        trace: Trace | None = None,
        device: ComputeDevice | str | None = None,
        ranks: Ranks | None = None,
        encodes: bool = False,
        is_mtp_head: bool = False,
        **settings: Unpack[Settings],
    ):
        self.config = apply_settings(config, settings)
        self.config = replace(self.config, sampling=resolve_schema(self.config.sampling))
        self._should_stop, self.trace, self.ranks = should_stop, trace, ranks
        self._shared = None if ranks is None else SharedRun.from_ranks(ranks)  # None in a single process
        if self._shared is not None:
            self.config = self._shared.rank_config(self.config)
        self._cache: RuntimeCache | None = None  # what is kept between calls, from `open` to `close`
        self._kernels: CompiledKernels | None = None  # None on an accelerator
        self._shape_with_kernels: ModelShape | None = None  # set while runs do not use compiled kernels
        self.baseline_bytes = 0  # host memory of this process that does not count for the budget
        self._is_closed = False
        self._latest: weakref.ref[ResultStream[Any]] | None = None  # the latest call's stream
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
            is_mtp_head=is_mtp_head,
        )
        loaded = replace(loaded, shape=with_kv_dtype(loaded.shape, self.config.kv.dtype))
        self.model: LoadedModel = loaded.for_device(self.device)
        self.config = resolve_generation_defaults(self.config, loaded.generation, loaded.shape.vocab_size)
        # The next three calls raise ConfigError for settings that the model does not support, before rows are read.
        require_beams_fit(self.config.policy, self.config.sampling)
        kv_tiers(self.model.shape, self.config, has_device=self.device.is_accelerator)
        self._sampler()
        offload = self.config.offload
        if self._shared is not None:
            self.model = self._shared.divide_model(self.model, offload, self.device)
        else:
            shape = gather_tables(self.model.shape, offload, make_budgets(offload, self.device))
            self.model = replace(self.model, shape=shape)
        self._draft = self._load_draft_model(encodes=encodes)
        if self._draft is not None:
            self.model = replace(self.model, shape=replace(self.model.shape, draft=self._draft.model.shape))
        self._copies: Copies = {}
        mirrors = self.config.model.mirrors
        if mirrors and not self.model.checkpoint.stripes:  # of a striped store, they are its other directories
            cache = cache_root(self.config.offload.cache_dir)
            compute_digests = partial(digest_files, cache=cache, should_stop=should_stop)
            self._copies = find_copies(self.model.checkpoint, mirrors, self.model.digests, compute_digests)
        self._advised: set[str] = set()  # advice that was logged already
        self._may_compare = False  # whether planning may measure which linear backends are fastest
        # Which runs need no self-check anymore: False in the set, runs without scores; True, runs with scores.
        self._checked_modes = set[bool]()
        if not self.device.is_accelerator:
            backends = find_products(self.host)
            if self._shared is not None:
                backends = self._shared.agree_on_backends(backends)
            elif backends is None:
                backends, self._may_compare = known_backends(self.host), True
            self.model = replace(self.model, backends=backends)
            self._kernels = compiled_kernels(self.model)
            if self._shared is not None:
                self.wait_for_kernels()  # all ranks must use kernels: their replicated results must be bitwise equal
            elif estimate_plain_seconds(self.model.shape, [MIN_TOKENS]) > COMPILING_SECONDS:
                self._kernels.begin()
        elif self.config.policy.attention is Attention.cpu:
            prepare_attention(self.model)
        if self._shared is not None:
            self._shared.share_memory(self.config.offload, self.device)
        self.baseline_bytes = resident_bytes()  # interpreter, libraries, the model without weights
        reset_peak()

    def open(self) -> Self:
        """Keeps weights and measured rates between calls until `close`. `with` calls it on entry."""
        self._require_open()
        if self._cache is None:
            self._cache = RuntimeCache(self.reader)
        if self._draft is not None:
            self._draft.open()
        return self

    def __enter__(self) -> Self:
        return self.open()

    def close(self) -> None:
        """Ends the current stream and frees weights, threads and files. Later calls raise ClosedError. Idempotent."""
        self._end_latest_stream("the end of its runtime")
        self._is_closed = True
        if self._draft is not None:
            self._draft.close()
        if self._kernels is not None:
            self._kernels.close()
        if self._cache is not None:
            self._cache.close()
            self._cache = None
            self._free_memory()

    def _free_memory(self) -> None:
        """Frees the memory of ended sessions."""
        gc.collect()  # an engine is part of a reference cycle
        self.device.empty_caches()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this runtime is closed: create another, or call it inside its `with` block")

    def _end_latest_stream(self, by: str) -> None:
        stream = self._latest() if self._latest is not None else None
        if stream is not None:
            stream.end(by)

    def _sampler(self) -> Sampler:
        return make_sampler(self.model, self.config.sampling, self.device.torch_device)

    def request(
        self, id: str, prompt: str | Sequence[int], *, overrides: SamplingOverrides | None = None
    ) -> Request | Rejected:
        """Makes the request for a prompt. Adds the tokenizer's special tokens to a text. Limits the length of the
        completion to the model's context."""
        return make_request(self.model, self.config.sampling, id, prompt, overrides or SamplingOverrides())

    def samples(self, made: Request | Rejected, count: int | None = None) -> list[Request | Rejected]:
        """Returns `count` copies of a request, with `sample_index` from 0 on; None means `sampling.n`."""
        return repeat_samples(made, self.config.sampling.n if count is None else count)

    def tokenize(self, texts: Sequence[str], *, is_rendered: bool = False) -> list[tuple[int, ...]]:
        """Token ids of each text. `is_rendered`: a chat template has already added the special tokens."""
        return tokenize(self.model, texts, is_rendered=is_rendered)

    @property
    def planner(self) -> Planner:
        self._require_open()
        return Planner(
            model=self.model,
            config=self.config,
            device=self.device,
            open_reader=self.reader,
            cache=self._cache,
            measures_rates=self.ranks is None,
            fixed_budgets=None if self._shared is None else self._shared.budgets,
            compares_backends=self._may_compare,
        )

    @property
    def host(self) -> Host:
        """The machine for which measured rates are valid."""
        return self.planner.host

    def budgets(self) -> Budgets:
        return self.planner.budgets

    def wait_for_kernels(self) -> None:
        """Waits until CPU kernels are compiled; useful before timing a short run. Raises Interrupted if `should_stop`
        returns True."""
        if self._kernels is None or self._kernels.are_ready:
            return
        before = resident_bytes()
        self._kernels.wait(self._should_stop)
        self.baseline_bytes += resident_bytes() - before
        if self._shape_with_kernels is not None:
            self.model = replace(self.model, shape=self._shape_with_kernels)
            self._shape_with_kernels = None
            self._checked_modes.clear()  # self-check and measured rates were without kernels: repeat them
            if self._cache is not None:
                self._cache.clear_rates()

    def _uses_plain_operators(self, requests: Sequence[Request]) -> bool:
        """Disables compiled kernels if the session for these requests is estimated to end before they are compiled.
        Updates the model's shape. Returns True if kernels were disabled."""
        if self._kernels is None or self._kernels.are_ready:
            return False
        shape, tokens = self.model.shape, [request.size.capacity_tokens for request in requests]
        if not self._kernels.use_plain_operators(estimate_plain_seconds(shape, tokens)):
            return False
        self._shape_with_kernels = self._shape_with_kernels or shape
        self.model = replace(self.model, shape=replace(shape, has_decode_kernel=False, has_fused_gates=False))
        return True

    def plan(self, requests: Sequence[Request], **options: Unpack[PlanOptions]) -> RunPlan:
        """Makes the plan for a run of these requests. Later sessions use the plan's linear backends."""
        if self._shape_with_kernels is None:
            self.wait_for_kernels()
        plan = self.planner.plan(self.sizes(requests), **options)
        if plan.backends is not None and plan.backends != (self.model.backends or DEFAULT_BACKENDS):
            self.model = replace(self.model, backends=plan.backends)
            self._may_compare = False
        return plan

    def revised(
        self, plan: RunPlan, requests: Sequence[Request], rates: MachineRates, routing: Routing | None = None
    ) -> RunPlan:
        """Returns `plan` with its prediction updated for `rates` and `routing`; see `Planner.revise`."""
        return self.planner.revise(plan, self.sizes(requests), rates, routing)

    def sizes(self, requests: Sequence[Request]) -> list[SequenceSize]:
        """The sizes of requests for planning. If the run shares prompt prefixes, each common prefix counts once."""
        has_lengths = self.model.rope_lengths is not None
        if prefix_sharing_obstacle(self.config, self.model.shape, has_rope_lengths=has_lengths) is None:
            return sequence_sizes(requests)
        return [request.size for request in requests]

    def resolved_settings(self, plan: RunPlan) -> ResolvedSettings:
        return self.planner.resolved_settings(plan)

    def require_within_budget(self, plan: RunPlan) -> None:
        """Raises MemoryError if this process uses more host memory than planned, above its baseline."""
        require_within_budget(plan.placement, self.baseline_bytes, self.device.num_sharers)

    @contextmanager
    def session(self, plan: RunPlan, resources: SessionResources | None = None) -> Iterator[Session]:
        """Opens a session with the plan's weights, buffers and reader threads. A runtime that was opened keeps weights
        and reader after the session. `resources`: shared by ranks that read weights together; nothing is kept then."""
        self._require_open()
        if self._shape_with_kernels is None:
            self.wait_for_kernels()
        weight_cache = self._weight_cache if resources is None else None
        setup = Setup(
            model=self.model,
            config=replace(self.config, policy=plan.policy),
            placement=plan.placement,
            device=self.device,
            trace=self.trace,
            weight_cache=weight_cache,
            resources=resources,
            drafts=plan.drafts,
        )
        limit = limit_device_memory(self.config.offload, self.device, weight_cache)
        num_bytes = self.model.shape.sizes.resident_bytes(plan.placement.resident, plan.placement.paged)
        cached_note = (
            ", except those in memory already" if weight_cache is not None and weight_cache.compute_bytes else ""
        )
        log.log(
            logging.INFO if num_bytes > LOGGED_BYTES else logging.DEBUG,
            "opening files, and reading %s of weights that stay in memory%s",
            format_bytes(num_bytes),
            cached_note,
        )
        begin = time.monotonic()
        rank_resources = nullcontext() if resources is None else resources
        with (
            limit,
            self._session_reader() as reader,
            rank_resources,
            open_streams(setup, reader) as streams,
            self._open_draft_model(setup, plan) as draft_model,
        ):
            sampler, shared = self._sampler(), self._shared
            rank_sync = None if shared is None else shared.rank_sync(self._should_stop)
            engine = Engine(
                setup,
                streams,
                sampler,
                self._should_stop if rank_sync is None else rank_sync.should_stop,
                agree_alone if rank_sync is None else rank_sync.agree_on_lanes,
                None if shared is None else shared.pipeline_link,
                draft_model,
            )
            seconds, reasoning = time.monotonic() - begin, sampler.reasoning
            if self.model.rounded is not None:
                log.info("weights were rounded while they were read: %s", self.model.weight_storage)
            if shared is None or rank_sync is None:
                yield Session(self.model, engine, plan, plan.policy, opening_seconds=seconds, reasoning=reasoning)
            else:
                yield shared.session_kind(
                    self.model, engine, plan, opening_seconds=seconds, reasoning=reasoning, rank_sync=rank_sync
                )

    @property
    def _weight_cache(self) -> WeightCache | None:
        """Weights that are kept between sessions; None if the runtime is not open."""
        return None if self._cache is None else self._cache.weights

    def _load_draft_model(self, *, encodes: bool) -> "Runtime | None":
        """Loads `policy.draft_model`, without weights. None if it is not set or cannot be used, which is logged."""
        path = self.config.policy.draft_model
        if path is None or encodes:
            return None
        obstacle = draft_obstacle(
            self.config, self.model.shape, has_rope_lengths=self.model.rope_lengths is not None
        ) or ("several ranks" if self._shared is not None else None)
        if obstacle is not None:
            log.warning("policy.draft_model is not used: %s", obstacle)
            return None
        is_head = path == MTP
        model = self.config.model if is_head else ModelConfig.from_name(path)
        model = replace(model, dtype=self.config.model.dtype, self_check=SelfCheck.off)
        config = RuntimeConfig(model=model, offload=replace(self.config.offload, gather_tables=False))
        try:
            draft = Runtime(config, device=self.device, should_stop=self._should_stop, is_mtp_head=is_head)
            if is_head:
                draft.model = replace(draft.model, shape=replace(draft.model.shape, name="the prediction head"))
                require_packed(draft.model)
            else:
                require_same_tokens(draft.model, self.model)
        except (CheckpointError, ConfigError) as error:
            raise ConfigError(f"policy.draft_model={path}: {error}") from error
        return draft

    @contextmanager
    def _open_draft_model(self, setup: Setup, plan: RunPlan) -> Iterator[DraftModel | None]:
        if self._draft is None or not plan.policy.draft_tokens:
            yield None
            return
        self._draft.wait_for_kernels()
        num_rows, draft = plan.num_lanes * plan.lane_size, self._draft.model
        is_head = draft.mtp_embedding is not None
        with (
            self._draft._session_reader() as reader,
            open_draft_model(
                draft,
                setup,
                reader,
                (lambda: False) if is_head else self._should_stop,  # a head runs inside passes, which must end
                num_rows=num_rows,
                weight_cache=self._draft._weight_cache,
                kind=MtpDrafts if is_head else DraftModel,
            ) as model,
        ):
            yield model

    @contextmanager
    def _session_reader(self) -> Iterator[Reader]:
        """Yields the cached reader, or a new one. After an error, the cached reader is closed."""
        if self._cache is None:
            with self.reader() as reader:
                yield reader
            return
        try:
            yield self._cache.reader()
        except GeneratorExit:
            raise
        except BaseException:
            self._cache.close_reader()
            raise

    @contextmanager
    def open_with_backoff(
        self, requests: Sequence[Request], **options: Unpack[PlanOptions]
    ) -> Iterator[tuple[RunPlan, Session]]:
        """Plans and opens a session. Waits for CPU kernels to be compiled, or runs without them if that is faster.

        Unless the policy is fixed or `blocks` are given, runs the first pass of the largest block as a trial. If the
        trial exceeds memory or the host budget, plans once more with half the block size. Raises BudgetError if the
        last plan does not fit, and MemoryShortage if memory runs out later. With ranks, only rank 0 calls this; other
        ranks call `follow`."""
        self._prepare_model(requests)
        blocks = options.get("blocks")
        if self._shared is not None:
            message = self._shared.plan(self.planner, requests, blocks, options.get("chunk_tokens"))
            plan = self._shared.plan_from_broadcast(message, self.planner, requests)
            self._check_lanes(plan, requests)
            reset_peak()
            resources = self._shared.begin(message)
            self.planner.log_plan(plan, self._advised)
            with self.session(plan, resources) as session:
                assert isinstance(session, RankSession)
                yield plan, session
                session.announce_close()
            return
        if not self._uses_plain_operators(requests):
            self.wait_for_kernels()
        kind = self.config.policy.kind
        may_back_off = blocks is None and kind is not PolicyKind.fixed
        for num_halvings in range(2):
            if num_halvings:
                gc.collect()  # frees the first trial's engine, which is part of a reference cycle
                reset_peak()
            plan = self.plan(requests, **(options | {"num_halvings": num_halvings}))
            options["rates"] = plan.rates
            self.planner.log_plan(plan, self._advised)
            self._check_lanes(plan, requests)
            # Memory that measurements, self-check and trial have left must not count for the budget, so the current
            # memory becomes the baseline. But cached weights must count, so with them the old baseline stays.
            if self._cache is None or not (self._cache.weights.compute_bytes or self._cache.weights.pinned_bytes):
                trim_heap()
                self.baseline_bytes = resident_bytes()
            reset_peak()
            with ExitStack() as stack:
                session: Session | None = None
                try:
                    session = stack.enter_context(self.session(plan))
                    if may_back_off and plan.blocks:
                        log.debug("running the first pass as a trial, to test that memory suffices")
                        session.probe(requests)
                        self.require_within_budget(plan)
                        if self.trace is not None:
                            self.trace.discard()
                except (MemoryError, OSError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    if num_halvings or not may_back_off:
                        raise plan_memory_error(plan.placement.ledgers, error) from error
                    reason = first_line(error)  # a logged exception object would keep the memory of its frames alive
                    log.warning("policy=%s: %s; trying again with half as many sequences per block", kind.value, reason)
                    session = None  # drop the reference before the stack closes, so that its memory is freed
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
        """Prepares the model's head for these requests: for scores and encodings, it must compute chosen positions
        only. Raises ConfigError if the model or the ranks do not support the requests."""
        if self._shared is not None:
            self._shared.require_broadcastable(requests)
        if any(request.encoding is None for request in requests):
            require_text(self.model)
        if any(request.scoring is not None for request in requests) or (
            self.model.head is not Head.none and any(request.encoding is not None for request in requests)
        ):
            slice_head(self.model.staged)

    def follow(self, requests: Sequence[Request]) -> Generator[tuple[int, Completion]]:
        """Takes part in each session that rank 0 opens for these requests, until rank 0 announces the end. Called by
        ranks other than 0. Yields (index in `requests`, completion) for all requests. Raises Interrupted, ConfigError,
        and PeerEnded if another rank ended."""
        shared = self._shared
        assert shared is not None, "without ranks, there is no rank 0"
        self._prepare_model(requests)
        while (message := shared.ranks.receive())[KIND] == SESSION:
            plan = shared.plan_from_broadcast(message["plan"], self.planner, requests)
            with self.session(plan, shared.join(message)) as session:
                assert isinstance(session, RankSession)
                yield from session.follow(requests)

    def _check_lanes(self, plan: RunPlan, requests: Sequence[Request]) -> None:
        """Runs the self-check before the first run and before the first scoring run, if `model.self_check` asks for it.
        No weights may be in memory. Skipped with tensor parallelism, where no single rank can run the class's own
        code."""
        seconds = 0.0 if plan.prediction is None else plan.prediction.seconds
        full_shape = self.model.shape if self._shared is None else self._shared.full_shape(self.model.shape)
        scores = any(request.scoring is not None for request in requests)
        is_first = full_shape is not None and scores not in self._checked_modes
        if is_first and plan.blocks and is_check_due(self.model, self.config.model.self_check, seconds):
            config, stop = self.config, self._should_stop
            check_lanes(replace(self.model, shape=full_shape), config, self.budgets(), self.reader, stop, scores=scores)
            gc.collect()  # frees the check's model, which is part of a reference cycle
        self._checked_modes |= {scores, False}  # a check with scores covers runs without

    def generate(self, prompts: Iterable[PromptLike]) -> list[Result]:
        """Generates `sampling.n` results per prompt, ordered by prompt, then sample. `prompts`: see `stream`."""
        return self._collect(GenerationTask(sampling=self.config.sampling), prompts)

    def stream(self, prompts: Iterable[PromptLike], *, window: int | None = None) -> CompletionStream:
        """Yields completions as they finish, `sampling.n` per prompt. Results of invalid prompts come first, with their
        `error`. A prompt is a text, token ids, chat messages, or a `Prompt`.

        All prompts are read before generation starts, since they are planned together. With a `window`, only that many
        prompts at a time are read, planned and generated: the iterator may be infinite, and weights are kept between
        windows. Computation starts with the first `next`. The next call of this runtime ends the stream. Raises
        ConfigError immediately if `prompts` is a single text. Errors of plans and sessions are raised during iteration;
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
        """Returns `table` plus the result columns of `runtime.library.columns`. In a row without a usable prompt,
        `status` is "error", and `error` has the reason.

        `prompt`: name of the column of texts, lists of token ids, or lists of messages. `id`: name of a column of
        unique ids that seed the sampling; None uses row numbers. `overrides`: field of `Prompt` -> name of the column
        with its values. `prefix` is prepended to the names of added columns. Raises ConfigError if a column is missing
        or a result column exists already, and the errors of `stream`.
        """
        from .tables import TableColumns  # imports pyarrow, an optional dependency of the library

        columns = TableColumns(prompt=prompt, id=id, overrides=overrides or {}, prefix=prefix)
        return columns.generate_results(table, self.config.sampling, self.generate)

    def score(self, pairs: Iterable[TargetsLike]) -> list[Scored]:
        """The log-probability of each target given its prompt, ordered by pair, then target. `pairs`: see
        `score_stream`."""
        return self._collect(ScoringTask(), pairs)

    def score_stream(self, pairs: Iterable[TargetsLike], *, window: int | None = None) -> ResultStream[Scored]:
        """Yields scores of targets as their prompts finish; invalid targets come first, with their `error`. A pair is
        `(prompt, target)`, `(prompt, [target, ...])` or `Targets`; a target is a text or token ids. Nothing is
        generated.

        Targets that differ only in their last token are computed once. `window` and errors: see `stream`. Also raises
        ConfigError if the model's head is not separate from its layers.
        """
        return self._stream(ScoringTask(), pairs, window)

    def score_documents(
        self, documents: Iterable[str | Sequence[int]], *, max_tokens: int | None = None
    ) -> list[ScoredDocument]:
        """The rolling log-likelihood of each document, a text or token ids, in windows of `max_tokens` tokens; None
        means the model's context. Raises the errors of `score`."""
        require_iterable(documents, None)
        return score_documents(self.model, documents, max_tokens, self.score)

    def embed(
        self, prompts: Iterable[PromptLike], *, pooling: str | Pooling | None = None, normalize: bool = False
    ) -> list[Embedded]:
        """One vector per prompt, in order; see `embed_stream`."""
        return self._collect(embedding_task(pooling, normalize=normalize), prompts)

    def embed_stream(
        self,
        prompts: Iterable[PromptLike],
        *,
        pooling: str | Pooling | None = None,
        normalize: bool = False,
        window: int | None = None,
    ) -> ResultStream[Embedded]:
        """Yields vectors as their prompts finish; invalid prompts come first, with their `error`.

        `pooling`: which hidden states after the model's last norm give the vector: that of the `last` token, of the
        first token (`cls`), or their `mean`. None uses the checkpoint's setting; without one, `mean` for encoders and
        `last` for decoders. `normalize`: scales vectors to length 1. `prompts`, `window` and errors: see `stream`.
        The tokenizer's special tokens are added to texts.
        """
        return self._stream(embedding_task(pooling, normalize=normalize), prompts, window)

    def classify(self, prompts: Iterable[PromptLike]) -> list[Classified]:
        """The classes of each prompt, in order, from a `*ForSequenceClassification` checkpoint."""
        return self._collect(CLASSIFICATION_TASK, prompts)

    def classify_stream(self, prompts: Iterable[PromptLike], *, window: int | None = None) -> ResultStream[Classified]:
        """Yields classes or rewards as their prompts finish; otherwise like `embed_stream`."""
        return self._stream(CLASSIFICATION_TASK, prompts, window)

    def fill_masks(self, prompts: Iterable[PromptLike], *, num_top: int = 5) -> list[Filled]:
        """The likeliest tokens for each prompt's masks, in order, from a `*ForMaskedLM` checkpoint."""
        return self._collect(mask_filling_task(self.model, num_top), prompts)

    def fill_masks_stream(
        self, prompts: Iterable[PromptLike], *, num_top: int = 5, window: int | None = None
    ) -> ResultStream[Filled]:
        """Yields the `num_top` likeliest tokens per mask as prompts finish; otherwise like `embed_stream`."""
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
        """Yields the results of `task`, window by window. With several windows, weights are kept between them."""
        with ExitStack() as stack:
            if window is not None and self._cache is None:
                self._cache = stack.enter_context(RuntimeCache(self.reader))
                stack.callback(setattr, self, "_cache", None)
            for inputs in task.windows(values, window):
                try:
                    yield from task.results(self.model, inputs, self._completions)
                finally:
                    if self._cache is not None:
                        self._free_memory()

    def _completions(self, requests: Sequence[Request]) -> Generator[tuple[int, Completion]]:
        """Yields (index in `requests`, completion), on every rank."""
        if not requests:
            return
        if self._cache is not None:
            reset_peak()  # earlier calls may have had another budget
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
            virtual_files=self.model.virtual_files,
            copies=self._copies,
            stripes=self.model.checkpoint.stripes,
        )
