"""Self-check before a run: compares the logits of our lanes with those of transformers' own `generate` for the same
tokens, on an excerpt of the model (a few layers and all modules outside of them).

Runs in float32 on the CPU, where the two differ by rounding only. Two lanes of two rows of different lengths, chunked
prefill, and more tokens than the windows or LongRoPE limits cover masks, windows, states and positions. Not covered:
accelerator code, and the mapping of checkpoint names to weights, which both sides share.
"""

import gc
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows  # `Sequence` is a running request
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedConfig

from ..checkpoint_source.download import as_checkpoint_error, short_reason
from ..checkpoint_source.location import read_config
from ..config.settings import (
    DType,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    SamplingConfig,
    SelfCheck,
    Tier,
)
from ..errors import BudgetError, CheckpointError, ConfigError, WeightstreamError
from ..model.families import FAMILIES
from ..model.head import slice_head
from ..model.loading import LoadedModel, load_model
from ..model.truncated_model import (
    TruncatedModel,
    dense_bytes,
    drop_unused_modules,
    load_parameters,
    num_representative_layers,
)
from ..plan.placement.placement import Budgets
from ..plan.planner import RunPlan, plan_run
from ..probing.heads import Head
from ..probing.meta import build_meta_model, initialize_again
from ..requests.scoring import make_scoring
from ..sequences.sampler import Sampler, make_sampler
from ..sequences.sequence import FinishReason, Request, Sequence
from ..store.reader import Reader
from ..stream.device import ComputeDevice
from ..units import MIB, format_bytes
from ..weights.layout import init_computed_parameters, pop_quantization_config
from .batcher import StaticBatcher
from .engine import Engine
from .setup import Setup, open_streams

PROMPT_LENGTHS = (5, 14, 9, 3)  # below and above the windows and limits of excerpts, not multiples of a chunk
NUM_NEW_TOKENS, CHUNK_TOKENS = 8, 8
TOKEN_ID_SUFFIXES = ("token_id", "token_ids", "token_index")


@dataclass(frozen=True, kw_only=True)
class TeacherForcing:
    """Requests with forced continuations: `tokens[id]` are appended, whatever the model would generate."""

    requests: tuple[Request, ...]
    tokens: Mapping[str, tuple[int, ...]]

    def largest_difference(self, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> "Difference":
        """The sequence that differs most, at its first token beyond rounding. Both mappings hold logits (T, V) by
        request id."""
        differences: list[Difference] = []
        for request in self.requests:
            our_TV, their_TV = ours[request.id], theirs[request.id]
            if not their_TV.isfinite().all():
                raise _Inconclusive("transformers' own logits are not finite")
            sizes_T = ((our_TV - their_TV).abs().amax(-1) / their_TV.std()).nan_to_num(torch.inf)
            steps_beyond = (sizes_T > TOLERANCE).nonzero().flatten().tolist()
            step = steps_beyond[0] if steps_beyond else int(sizes_T.argmax())
            differences.append(Difference(size=float(sizes_T.max()), request=request, step=step))
        return max(differences, key=lambda each: each.size)


def make_teacher_forcing(model: LoadedModel, *, seed: int) -> TeacherForcing | None:
    """Random tokens that are not special to the class. None if its context or vocabulary is too small."""
    config, special = model.staged.model.config, set[int]()
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        for name, value in vars(part).items():
            if name.endswith(TOKEN_ID_SUFFIXES):
                special.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    ordinary = [i for i in range(min(model.shape.vocab_size, 4096)) if i not in special]
    if model.shape.context_tokens < max(PROMPT_LENGTHS) + NUM_NEW_TOKENS or not ordinary:
        return None
    generator = torch.Generator().manual_seed(seed)

    def random_tokens(count: int) -> tuple[int, ...]:
        return tuple(ordinary[i] for i in torch.randint(len(ordinary), (count,), generator=generator).tolist())

    requests = tuple(
        Request(id=str(row), prompt_ids=random_tokens(length), max_new_tokens=NUM_NEW_TOKENS)
        for row, length in enumerate(PROMPT_LENGTHS)
    )
    return TeacherForcing(requests=requests, tokens={request.id: random_tokens(NUM_NEW_TOKENS) for request in requests})


class _ForcedTokens(LogitsProcessor):
    def __init__(self, tokens: tuple[int, ...], num_before: int):
        self._tokens, self._num_before = tokens, num_before

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._tokens[input_ids.shape[1] - self._num_before]] = 0.0
        return forced


@torch.no_grad()
def run_generate(
    loaded: LoadedModel, truncated: TruncatedModel, forcing: TeacherForcing, scores: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Runs the class's own `generate` on dense float32 weights, one prompt at a time. Returns logits (T, V) by request
    id at each forced token and, with `scores`, the tokens' log-probabilities (T,) from one forward without a cache.
    `loaded`: the excerpt as lanes load it, to locate weights. May raise anything that the class raises."""
    config = read_config(loaded.checkpoint.path)
    pop_quantization_config(config)
    truncated.shorten(config)
    model: Any = build_meta_model(config, torch.float32)
    drop_unused_modules(model)
    init_computed_parameters(model, loaded.checkpoint.tensors.keys())
    truncated.cut(model)
    stages = loaded.shape.stages
    parameters = {p.name: p for stage in stages for p in (*stage.parameters, *stage.tables)}
    load_parameters(model, parameters, loaded.checkpoint, loaded.virtual_files)
    initialize_again(model)
    model.generation_config = GenerationConfig()  # the class's own may enable beams
    logits: dict[str, torch.Tensor] = {}
    logprobs: dict[str, torch.Tensor] = {}
    for request in forcing.requests:
        ids = torch.tensor([request.prompt_ids])
        tokens = forcing.tokens[request.id]
        num_before = 1 if config.is_encoder_decoder else len(request.prompt_ids)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                max_new_tokens=len(tokens),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                decoder_start_token_id=loaded.start_token_id,
                output_logits=True,
                return_dict_in_generate=True,
            ),
            logits_processor=LogitsProcessorList([_ForcedTokens(tokens, num_before)]),
        )
        logits[request.id] = torch.cat(out.logits).float()
        if scores:
            tokens_1T, start = torch.tensor([tokens]), loaded.start_token_id
            if start is not None:
                decoded_1T = torch.cat([torch.tensor([[start]]), tokens_1T[:, :-1]], 1)
                logits_TV = model(input_ids=ids, decoder_input_ids=decoded_1T).logits[0]
            else:
                logits_TV = model(input_ids=torch.cat([ids, tokens_1T], 1)).logits[0, ids.shape[1] - 1 : -1]
            logprobs_TV = logits_TV.float().log_softmax(-1)
            logprobs[request.id] = logprobs_TV.gather(-1, tokens_1T[0, :, None])[:, 0]
    return logits, logprobs


class ForcedSampler(Sampler):
    """Sampler that forces `tokens`, by request id, and collects `logits[id]`: a float32 row (V,) per token."""

    def __init__(self, tokens: Mapping[str, Rows[int]]):
        self._tokens = tokens
        self.logits: defaultdict[str, list[torch.Tensor]] = defaultdict(list)

    def sample(self, sequences: Rows[Sequence], logits_BV: torch.Tensor) -> torch.Tensor:
        """Returns the raw logits. A pass that samples nothing has one dummy row, which is dropped."""
        return logits_BV[: len(sequences)].float().view(torch.int32)

    def accept(self, sequences: Rows[Sequence], drawn: torch.Tensor, step: int) -> None:
        for sequence, logits_V in zip(sequences, drawn.view(torch.float32), strict=True):
            forcing, logits = self._tokens[sequence.request.id], self.logits[sequence.request.id]
            sequence.generated.append(forcing[len(logits)])
            logits.append(logits_V.clone())
            if len(logits) == len(forcing):
                sequence.finish = FinishReason.length


log = logging.getLogger(__name__)

TOLERANCE = 3e-3  # in standard deviations of logits; rounding reaches 1.2e-4 over all supported families
SCORE_TOLERANCE = 1e-4  # of a token's log-probability, times the standard deviation of logits if that is above 1
LONG_RUN_SECONDS, SMALL_EXCERPT_BYTES = 120.0, 256 * MIB  # the check then costs little compared to the run
CPU = torch.device("cpu")


class _Inconclusive(Exception):
    """The self-check cannot judge this model; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference of one comparison, in standard deviations of a sequence's logits. `step` counts new tokens
    from 0."""

    size: float
    request: Request
    step: int

    @property
    def is_rounding(self) -> bool:
        return self.size <= TOLERANCE


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """Result of one comparison. `score`: the largest error of a log-probability, divided by its tolerance."""

    forcing: TeacherForcing
    plan: RunPlan
    worst: Difference
    score: float

    @property
    def is_rounding(self) -> bool:
        return self.worst.is_rounding and self.score <= 1


def is_check_due(model: LoadedModel, mode: SelfCheck, run_seconds: float) -> bool:
    """True if the model should be checked. With `auto`, supported families are checked only if the check is cheap, and
    models without text generation never. `run_seconds`: estimated duration of the run; 0 if unknown."""
    if mode is SelfCheck.auto and model.head is not Head.text:
        return False
    if mode is not SelfCheck.auto:
        return mode is SelfCheck.full
    if model.config.get("model_type") not in {family.model_type for family in FAMILIES.values()}:
        return True
    num_layers = num_representative_layers(model.shape, model.staged.model.config)
    return run_seconds >= LONG_RUN_SECONDS and dense_bytes(model.shape, num_layers) <= SMALL_EXCERPT_BYTES


def check_lanes(
    model: LoadedModel,
    config: RuntimeConfig,
    budgets: Budgets,
    open_reader: Callable[[], Reader],
    should_stop: Callable[[], bool],
    *,
    scores: bool = False,
) -> None:
    """Runs the self-check within the host budget, which must be unused. `scores`: compare log-probabilities too. Raises
    ConfigError if lanes differ from the class by more than rounding; logs a warning if the check is inconclusive."""
    begin = time.monotonic()
    check = _Check(
        model=model, config=config, budgets=budgets, open_reader=open_reader, should_stop=should_stop, scores=scores
    )
    try:
        summary = check.run()
    except _Inconclusive as why:
        log.warning("self-check: %s is not checked: %s", type(model.staged.model).__name__, why)
        return
    finally:
        gc.collect()  # modules and greenlets refer to one another
    log.debug("self-check: %s; %.1f s", summary, time.monotonic() - begin)


@dataclass(frozen=True, kw_only=True)
class _Check:
    model: LoadedModel
    config: RuntimeConfig
    budgets: Budgets
    open_reader: Callable[[], Reader]
    should_stop: Callable[[], bool]
    scores: bool

    def run(self) -> str:
        """Returns a summary for the log if the check passes."""
        truncated, representative = self._choose_truncation()
        comparison = self._compare(truncated, seed=0)
        if not comparison.is_rounding:  # rounding may have changed the routing of a token between two equal experts
            comparison = self._compare(truncated, seed=1)
        if not comparison.worst.is_rounding:
            plan, worst = comparison.plan, comparison.worst
            groups = [group for block in plan.blocks for group in block.micro_batches]
            lengths = [[len(comparison.forcing.requests[i].prompt_ids) for i in group] for group in groups]
            raise ConfigError(
                f"model.self_check: the logits of {type(self.model.staged.model).__name__} in "
                f"{self._describe_lanes(plan)} differ from those of its own generate: the sequence of "
                f"{len(worst.request.prompt_ids)} prompt tokens differs at new token {worst.step} by {worst.size:.2g} "
                f"standard deviations of logits (tolerance {TOLERANCE}); lanes with prompts of {lengths} tokens, "
                f"{truncated.num_layers} of {len(self.model.shape.layers)} layers, float32. "
                f"{self._suggest_settings()}"
            )
        if not comparison.is_rounding:
            raise ConfigError(
                f"model.self_check: log-probabilities of {type(self.model.staged.model).__name__} differ from those of "
                f"its own forward by {comparison.score:.1g} times the tolerance of {SCORE_TOLERANCE}, in "
                f"{truncated.num_layers} of {len(self.model.shape.layers)} layers, float32. Its greedy tokens are "
                "right, its scores may be wrong. To score anyway: model.self_check=off"
            )
        missing = f" ({representative} would cover every kind)" if truncated.num_layers < representative else ""
        compared = "logits and log-probabilities" if self.scores else "logits"
        return (
            f"{compared} of {len(comparison.forcing.requests)} sequences in {self._describe_lanes(comparison.plan)} "
            f"match transformers within {comparison.worst.size:.0e} standard deviations, in "
            f"{truncated.num_layers} of {len(self.model.shape.layers)} layers{missing}"
        )

    def _compare(self, truncated: TruncatedModel, seed: int) -> _Comparison:
        forcing = make_teacher_forcing(self.model, seed=seed)
        if forcing is None:
            raise _Inconclusive(f"its context of {self.model.shape.context_tokens} tokens is too short")
        loaded = self._load_truncated(truncated)
        try:
            with as_checkpoint_error(f"its own generate fails with {truncated.num_layers} layers"):
                logits, logprobs = run_generate(loaded, truncated, forcing, self.scores)
        except CheckpointError as error:
            raise _Inconclusive(str(error)) from error
        del loaded
        sampler = ForcedSampler(forcing.tokens)
        plan, _ = self._run_in_lanes(truncated, forcing.requests, sampler)
        ours = {id: torch.stack(rows) for id, rows in sampler.logits.items()}
        worst = forcing.largest_difference(ours, logits)
        return _Comparison(
            forcing=forcing, plan=plan, worst=worst, score=self._score_error(truncated, forcing, logits, logprobs)
        )

    def _score_error(
        self,
        truncated: TruncatedModel,
        forcing: TeacherForcing,
        logits: Mapping[str, torch.Tensor],
        logprobs: Mapping[str, torch.Tensor],
    ) -> float:
        """The largest difference of a forced token's log-probability, divided by the tolerance; 0 without scores."""
        if not self.scores:
            return 0.0
        scorings = [make_scoring(self.model, r.id, r.prompt_ids, forcing.tokens[r.id]) for r in forcing.requests]
        requests = [request for request in scorings if isinstance(request, Request)]
        sampler = make_sampler(self.model, SamplingConfig(), CPU)
        _, sequences = self._run_in_lanes(truncated, requests, sampler)
        sizes = [0.0]
        for sequence in sequences:
            id, own_T = sequence.request.id, torch.tensor([score.own for score in sequence.scores])
            unit = SCORE_TOLERANCE * max(1.0, float(logits[id].std()))
            sizes.append(float((own_T - logprobs[id]).abs().nan_to_num(torch.inf).max()) / unit)
        return max(sizes)

    def _choose_truncation(self) -> tuple[TruncatedModel, int]:
        """The largest excerpt that fits the budget, and the number of layers that would cover every layer kind."""
        shape, budget = self.model.shape, self.budgets.host_bytes
        num_all = len(shape.layers)
        is_full = self.config.model.self_check is SelfCheck.full
        representative = num_representative_layers(shape, self.model.staged.model.config)
        sizes = {
            count: dense_bytes(shape, count) for count in ({num_all} if is_full else set()) | {representative, 2, 1}
        }
        fitting = [count for count, size in sizes.items() if size <= budget and count <= num_all]
        if not fitting:
            raise _Inconclusive(
                f"one layer and the modules outside of layers take {format_bytes(min(sizes.values()))} in float32; "
                f"offload.host_memory_gib allows {format_bytes(budget)}"
            )
        return TruncatedModel(num_layers=max(fitting), is_packed=shape.is_packed), representative

    def _run_in_lanes(
        self, truncated: TruncatedModel, requests: Rows[Request], sampler: Sampler
    ) -> tuple[RunPlan, list[Sequence]]:
        """Runs the requests in lanes. Returns the plan and the finished sequences."""
        try:
            return self._generate_in_lanes(self._load_truncated(truncated), requests, sampler)
        except (BudgetError, MemoryError) as error:
            raise _Inconclusive(str(error).partition("\n")[0]) from error
        except WeightstreamError:
            raise
        except Exception as error:  # a class may raise anything
            raise ConfigError(
                f"model.self_check: {type(self.model.staged.model).__name__} runs alone but fails in "
                f"{self._lane_kind} lanes: {short_reason(error)}; {self._suggest_settings()}"
            ) from error

    def _load_truncated(self, truncated: TruncatedModel) -> LoadedModel:
        config = replace(self.config.model, dtype=DType.float32)
        try:
            return load_model(config, CPU, self.config.offload.cache_dir, truncated=truncated)
        except (CheckpointError, ConfigError) as error:  # caused by truncation: the whole model loaded before
            raise _Inconclusive(f"it cannot be truncated to {truncated.num_layers} layers: {error}") from error

    def _generate_in_lanes(
        self, model: LoadedModel, requests: Rows[Request], sampler: Sampler
    ) -> tuple[RunPlan, list[Sequence]]:
        if any(request.scoring is not None for request in requests):
            slice_head(model.staged)
        config = RuntimeConfig(
            model=replace(self.config.model, graphs=False),
            offload=OffloadConfig(tier=Tier.none),
            policy=PolicyConfig(
                kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=2, prefill_chunk_tokens=CHUNK_TOKENS
            ),
        )
        sizes = [request.size for request in requests]
        plan = plan_run(model.shape, config, Budgets(host_bytes=self.budgets.host_bytes), sizes)
        setup = Setup(
            model=model,
            config=replace(config, policy=plan.policy),
            placement=plan.placement,
            device=ComputeDevice("cpu"),
            trace=None,
        )
        sequences = [Sequence(request=request) for request in requests]
        with self.open_reader() as reader, open_streams(setup, reader) as streams:
            engine = Engine(setup, streams, sampler, self.should_stop)
            for block in plan.blocks:
                lanes = [[sequences[i] for i in group] for group in block.micro_batches]
                with StaticBatcher.from_block(engine.lanes, block.index, lanes) as batcher:
                    while engine.step(batcher) is not None:
                        pass
        return plan, sequences

    @property
    def _lane_kind(self) -> str:
        return "packed" if self.model.shape.is_packed else "padded"

    def _describe_lanes(self, plan: RunPlan) -> str:
        return f"{plan.num_lanes} {self._lane_kind} lanes of {plan.lane_size}"

    def _suggest_settings(self) -> str:
        padded = "try model.lanes=padded; " if self.model.shape.is_packed else ""
        return f"{padded}model.self_check=off runs it anyway, with tokens that may be wrong"
