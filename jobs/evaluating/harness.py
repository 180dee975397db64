"""Runs lm-evaluation-harness on top of resumable runs: all requests of one type become one run. Text is tokenized as
the harness' own `hf` model does.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import lm_eval
import pyarrow.parquet as pq
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window, make_table
from transformers import PreTrainedTokenizerBase

from runtime.config.settings import SamplingOverrides
from runtime.errors import ConfigError, DamagedRunError, EvaluationError, WeightstreamError
from runtime.library.api import Runtime
from runtime.model.loading import LoadedModel
from runtime.requests.joining import join_requests
from runtime.requests.prompts import Rejected
from runtime.requests.scoring import make_scoring
from runtime.sequences.sequence import Request

from ..config.settings import GenerateConfig
from ..datasets import Row
from ..files.locks import RunLock
from ..files.publishing import JsonValue, make_directory, publish, read_json, write_all, write_json
from ..record.output_rows import score_schema
from ..record.passes import Start
from ..record.run_dir import EVALUATION_NAME, RunDirectory
from ..run.requests import Prompt, completion_requests
from ..run.run import run_task
from ..run.tasks.generate import generation_task
from ..run.tasks.task import Task
from ..tracking.feed import RunFeed
from .config import EvaluateConfig, evaluation_directory, to_generate_config

GENERATION_KWARGS = frozenset({"do_sample", "temperature", "max_gen_toks", "until"})
SAMPLING_KWARGS = {"top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repetition_penalty"}
_ROW = Row(index=0, id="", prompt="", messages=None, columns={}, error=None)
TokenIds: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A completion request. `sampling`: settings of the run that serves it; `temperature` 0 is greedy."""

    context_ids: TokenIds
    max_new_tokens: int
    stop: tuple[str, ...]
    temperature: float = 0.0
    sampling: tuple[tuple[str, Any], ...] = ()

    def row(self, index: int) -> Row:
        """Builds the run's row for this request."""
        overrides = SamplingOverrides(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, stop=list(self.stop)
        )
        return replace(_ROW, index=index, id=str(index), prompt_ids=self.context_ids, overrides=overrides)


class RunAnswerer:
    """Answers an evaluation's requests with runs in `directory`, and reuses finished answers of an earlier start.
    Raises the errors of runtime.errors."""

    def __init__(
        self,
        config: GenerateConfig,
        directory: Path,
        should_stop: Callable[[], bool],
        start: Start,
        feed: RunFeed | None = None,
    ):
        self._config, self.directory = to_generate_config(config), directory
        self._should_stop, self._start, self._feed = should_stop, start, feed
        self.model: LoadedModel = Runtime(config.runtime, should_stop=should_stop).model

    @property
    def name(self) -> str:
        return self._config.model.path or self._config.model.name

    def generate(self, kind: str, requests: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
        """Returns the token ids of each completion, in request order. All requests share one `sampling`. Identical
        greedy requests are generated once."""
        sampling = replace(self._config.sampling, **dict(requests[0].sampling))
        config = replace(self._config, sampling=sampling)
        # sampled requests are never merged, even if identical
        keys = [(request, index if request.temperature else None) for index, request in enumerate(requests)]
        distinct = dict(zip(keys, requests, strict=True))
        rows = [request.row(index) for index, request in enumerate(distinct.values())]
        task = replace(
            generation_task(config),
            directory=self.directory / kind,
            rows=lambda *_: rows,
            requests=_requests_with_completion_stops,
        )
        answers = dict(zip(distinct, self._run_task(task, config, ["token_ids"]), strict=True))
        return [tuple(answers[key]["token_ids"]) for key in keys]

    def score(self, kind: str, targets: Sequence[tuple[TokenIds, TokenIds]]) -> list[tuple[float, bool]]:
        """Returns (log-probability, is greedy) of each target given its context, in order; neither may be empty.
        Targets with the same context, such as single-token choices, may share a forward pass."""
        requests: list[Request] = []
        for context_ids, target_ids in targets:
            scoring_request = make_scoring(self.model, "", context_ids, target_ids)
            if isinstance(scoring_request, Rejected):
                raise EvaluationError(f"cannot score a target of {len(target_ids):,} tokens: {scoring_request.error}")
            requests.append(scoring_request)
        joined, rows = join_requests(requests), list[Row]()
        for index, request in enumerate(group.request for group in joined):
            assert request.scoring is not None, "made by make_scoring"
            parts = (request.scoring.last_ids, request.scoring.decoder_ids or ())
            last, decoder = ("-".join(map(str, ids)) for ids in parts)
            # the id encodes the scored tokens: a resumed run must score the same ones
            name = f"{index}/{request.scoring.num_positions}/{last}{decoder and f'/{decoder}'}"
            rows.append(replace(_ROW, index=index, id=name, prompt_ids=request.prompt_ids))
        sampling = replace(self._config.sampling, logprobs=1, max_new_tokens=0)
        task = Task(
            directory=self.directory / kind,
            columns=lambda _: score_schema(has_top=True),
            requests=lambda _, pending: [[replace(joined[row.index].request, id=row.id)] for row, _ in pending],
            rows=lambda *_: rows,
        )
        columns = ["token_logprobs", "top_token_ids"]
        answers = self._run_task(task, replace(self._config, sampling=sampling), columns)
        scores: dict[int, tuple[float, bool]] = {}
        for group, answer in zip(joined, answers, strict=True):
            for member in group.members:
                scoring, request = group.request.scoring, requests[member]
                assert scoring is not None, "joined from scored requests"
                assert request.scoring is not None, "made by make_scoring"
                positions = scoring.positions_of(request.scoring)
                greedy_ids = [answer["top_token_ids"][position][0] for position in positions]
                logprob = math.fsum(answer["token_logprobs"][position] for position in positions)
                scores[member] = (logprob, greedy_ids == list(request.target_ids))
        return [scores[member] for member in range(len(targets))]

    def _run_task(self, task: Task, config: GenerateConfig, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Runs a task and returns its answers in row order."""
        outcome = run_task(task, config, self._should_stop, self._start, feed=self._feed)
        path = RunDirectory(path=outcome.directory).generations
        table = pq.read_table(path, columns=["row_index", "error", *columns])
        answers = table.sort_by("row_index").to_pylist()
        failed = [answer for answer in answers if answer["error"] is not None]
        if failed:
            first = f"request {failed[0]['row_index']}: {failed[0]['error']}"
            raise EvaluationError(f"{outcome.directory}: {len(failed)} of {len(answers)} requests failed; {first}")
        return answers


def _requests_with_completion_stops(
    runtime: Runtime, rows: Sequence[tuple[Row, Prompt]]
) -> Iterator[list[Request | Rejected]]:
    """Builds requests that match stop strings in the completion only, as the harness' own models do."""
    for requests in completion_requests(runtime, rows):
        yield [replace(r, stops_begin_in_prompt=False) if isinstance(r, Request) else r for r in requests]


class HarnessModel(TemplateLM):
    """lm-evaluation-harness model backed by `RunAnswerer`. Raises the errors of runtime.errors."""

    def __init__(self, answerer: RunAnswerer):
        super().__init__()
        self._answerer = answerer
        model = answerer.model
        if model.tokenizer is None:
            raise ConfigError(f"{model.checkpoint.path} has no tokenizer, which tasks need: set model.tokenizer")
        self.tokenizer: PreTrainedTokenizerBase = model.tokenizer
        self.backend = "seq2seq" if model.start_token_id is not None else "causal"
        self.max_length = model.shape.context_tokens
        self.max_gen_toks = 256

    @property
    def eot_token_id(self) -> int:
        return self._special_token_id("eos_token")

    @property
    def prefix_token_id(self) -> int:
        return self._special_token_id("bos_token" if self.tokenizer.bos_token_id is not None else "eos_token")

    def _special_token_id(self, name: str) -> int:
        token = getattr(self.tokenizer, f"{name}_id")
        if not isinstance(token, int):
            raise ConfigError(f"the tokenizer of {self.tokenizer_name} has no {name}, which the harness needs")
        return token

    @property
    def tokenizer_name(self) -> str:
        return self._answerer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Returns token ids. By default adds special tokens, unless the text already begins with BOS."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Log-probability of each target given its context, and True if it is greedy. Truncates from the left."""
        targets = [self._target(context, target) for _, context, target in requests]
        scores = self._answerer.score("loglikelihood", targets)
        for (pair, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, score)
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, in the harness' rolling windows; each token counts once."""
        targets: list[list[tuple[TokenIds, TokenIds]]] = []
        for instance in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(instance.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            targets.append([self._target(*make_disjoint_window(window)) for window in windows])
        flat = [target for windows in targets for target in windows]
        scores = iter(self._answerer.score("loglikelihood_rolling", flat))
        return [sum(next(scores)[0] for _ in windows) for windows in targets]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The completion of each context, cut at the first stop string. Requests with equal sampling share a run."""
        generations = [self._generation(*instance.args) for instance in requests]
        texts: dict[int, str] = {}
        order = sorted(range(len(generations)), key=lambda index: generations[index].sampling)
        for number, (_, members) in enumerate(groupby(order, key=lambda index: generations[index].sampling)):
            indices = list(members)
            token_ids = self._answerer.generate(f"generate_until-{number}", [generations[i] for i in indices])
            for index, ids in zip(indices, token_ids, strict=True):
                # Decoded without the prompt, for equal results to the harness' `hf` model: a SentencePiece decoder then
                # strips a first space, which the `completion` column has.
                text = str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
                texts[index] = postprocess_generated_text(text, list(generations[index].stop), None)
        return [texts[index] for index in range(len(generations))]

    def _target(self, context: Sequence[int], target: Sequence[int]) -> tuple[TokenIds, TokenIds]:
        if self.backend == "seq2seq":  # context and target have separate limits
            return tuple(context[-self.max_length :]), tuple(target)
        ids = [*context, *target][-(self.max_length + 1) :]
        return tuple(ids[: len(ids) - len(target)]), tuple(target)

    def _generation(self, context: str, gen_kwargs: dict[str, object]) -> GenerationRequest:
        settings = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        max_new_tokens = int(str(settings["max_gen_toks"]))
        if max_new_tokens >= self.max_length:
            raise ConfigError(
                f"a task needs {max_new_tokens:,} new tokens, above the model's context of {self.max_length:,} tokens: "
                "set fewer with harness.gen_kwargs={max_gen_toks: ...}"
            )
        unknown = sorted(settings.keys() - GENERATION_KWARGS - SAMPLING_KWARGS.keys())
        if unknown:
            raise ConfigError(f"a task sets {', '.join(unknown)}, which weightstream evaluate does not support")
        temperature = float(str(settings.get("temperature") or 0.0)) if settings["do_sample"] else 0.0
        sampling = ((name, settings[key]) for key, name in SAMPLING_KWARGS.items() if key in settings and temperature)
        return GenerationRequest(
            context_ids=tuple(self.tok_encode(context)[max_new_tokens - self.max_length :]),
            max_new_tokens=max_new_tokens,
            stop=tuple(handle_stop_sequences(settings["until"], eos=eos)),  # pyright: ignore[reportArgumentType]
            temperature=temperature,
            sampling=tuple(sampling),
        )


log = logging.getLogger(__name__)
UNSTABLE = frozenset({"date", "git_hash", "start_time", "end_time", "total_evaluation_time_seconds"})


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of an evaluation. `tables`: the harness' tables of tasks and, if any, groups."""

    directory: Path
    results: Mapping[str, Any]
    tables: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        return [*self.tables, f"output: {self.directory}"]


def evaluate(
    config: EvaluateConfig,
    manager: TaskManager,
    should_stop: Callable[[], bool],
    start: Start,
    feed: RunFeed | None = None,
) -> Evaluation:
    """Runs the tasks and writes the harness' results. `feed`: gets the curves of all runs. Raises the errors of
    runtime.errors; EvaluationError for those of the harness, such as a task that cannot be loaded."""
    directory = RunDirectory(path=make_directory(evaluation_directory(config)))
    lock = RunLock(directory.lock)
    try:
        _write_record(directory.path / EVALUATION_NAME, config)
        model = HarnessModel(RunAnswerer(config, directory.path, should_stop, start, feed))
        return _evaluate(config, directory.path, manager, model)
    finally:
        lock.release()


def _write_record(path: Path, config: EvaluateConfig) -> None:
    """Writes model and tasks, for `status` and `report`, if they are not those of an earlier start."""
    model = config.model.path or config.model.name
    record: dict[str, JsonValue] = {"model": model, "tasks": [*config.tasks]}
    try:
        is_same = read_json(path) == record
    except (OSError, DamagedRunError):
        is_same = False
    if not is_same:
        write_json(path, record, exclusive=False)


def _evaluate(config: EvaluateConfig, directory: Path, manager: TaskManager, model: HarnessModel) -> Evaluation:
    harness = config.harness
    tracker = EvaluationTracker(output_path=str(directory / "harness"))
    if not any((folder / ".git").exists() for folder in (Path.cwd(), *Path.cwd().parents)):
        # Outside of a repository git would print an error.
        vars(import_module("lm_eval.evaluator"))["get_git_commit_hash"] = lambda: None
    try:
        results = simple_evaluate(
            model,
            model_args={"pretrained": model.tokenizer_name},
            evaluation_tracker=tracker,
            task_manager=manager,
            tasks=list(config.tasks),
            num_fewshot=harness.num_fewshot,
            limit=harness.limit if harness.limit is None or harness.limit < 1 else int(harness.limit),
            apply_chat_template=harness.apply_chat_template,
            fewshot_as_multiturn=harness.fewshot_as_multiturn,
            system_instruction=harness.system_instruction,
            gen_kwargs=dict[str, Any](harness.gen_kwargs) if harness.gen_kwargs else None,
            bootstrap_iters=harness.bootstrap_iters,
            random_seed=harness.seed,
            numpy_random_seed=harness.seed,
            torch_random_seed=harness.seed,
            fewshot_random_seed=harness.fewshot_seed,
            confirm_run_unsafe_code=harness.confirm_run_unsafe_code,
        )
    except WeightstreamError:
        raise
    except Exception as error:
        log.debug("the harness failed", exc_info=True)
        raise EvaluationError(
            f"lm-evaluation-harness {lm_eval.__version__}: {type(error).__name__}: {error}"
        ) from error
    assert results is not None, "None only on ranks above 0"
    all_results: dict[str, Any] = dict(results)
    samples = all_results.pop("samples", {})
    stable = {key: value for key, value in all_results.items() if key not in UNSTABLE}  # equal on each start
    text = json.dumps(stable, indent=2, sort_keys=True, default=handle_non_serializable, ensure_ascii=False)
    publish(directory / "results.json", lambda file: write_all(file, text.encode()), exclusive=False)
    tracker.save_results_aggregated(results=all_results, samples=samples)
    for task, rows in samples.items():
        tracker.save_results_samples(task_name=task, samples=rows)
    tables = [make_table(all_results)] + ([make_table(all_results, "groups")] if all_results.get("groups") else [])
    return Evaluation(directory=directory, results=stable, tables=tuple(tables))
