"""A harness' requests as runs: each kind of them has a run directory, which goes on where it was stopped."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.parquet as pq

from runtime.config.settings import SamplingOverrides
from runtime.errors import EvaluationError
from runtime.library.api import Runtime
from runtime.model.loading import LoadedModel
from runtime.requests.joining import join
from runtime.requests.prompts import Rejected
from runtime.requests.scoring import make_scoring
from runtime.sequences.sequence import Request

from ..config.settings import GenerateConfig
from ..datasets import Row
from ..record.output_rows import score_schema
from ..record.passes import Start
from ..record.run_dir import RunDirectory
from ..run.generation import Task, generation, perform
from ..run.requests import Prompt, completions_of

_ROW = Row(index=0, id="", prompt="", messages=None, columns={}, error=None)
Tokens: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What is generated behind a context. `sampling`: settings of the run that the request is in; greedy with
    `temperature` 0."""

    context_ids: Tokens
    max_new_tokens: int
    stop: tuple[str, ...]
    temperature: float = 0.0
    sampling: tuple[tuple[str, Any], ...] = ()


def settings_of_runs(config: GenerateConfig) -> GenerateConfig:
    """What the runs of an evaluation are told of its settings."""
    return GenerateConfig(**{each.name: getattr(config, each.name) for each in fields(GenerateConfig)})


class Answerer:
    """Answers the requests of one evaluation, whose runs lie in `directory`; those that an earlier start has answered
    are read. Raises the errors of runtime.errors."""

    def __init__(self, config: GenerateConfig, directory: Path, should_stop: Callable[[], bool], start: Start):
        self._config, self.directory = settings_of_runs(config), directory
        self._should_stop, self._start = should_stop, start
        self.model: LoadedModel = Runtime(config.runtime, should_stop=should_stop).model

    @property
    def name(self) -> str:
        return self._config.model.path or self._config.model.name

    def generated(self, kind: str, requests: Sequence[Generation]) -> list[tuple[int, ...]]:
        """The token ids of each completion, in the order of `requests`, which have their `sampling` in common. What is
        asked greedily more than once is generated once."""
        sampling = replace(self._config.sampling, **dict(requests[0].sampling))
        config = replace(self._config, sampling=sampling)
        distinct = {_key(request, index): request for index, request in enumerate(requests)}
        rows: list[Row] = []
        for index, each in enumerate(distinct.values()):
            overrides = SamplingOverrides(
                max_new_tokens=each.max_new_tokens, temperature=each.temperature, stop=list(each.stop)
            )
            rows.append(replace(_ROW, index=index, id=str(index), prompt_ids=each.context_ids, overrides=overrides))
        task = replace(generation(config), directory=self.directory / kind, rows=lambda *_: rows, requests=_own_stops)
        answers = dict(zip(distinct, self._answers(task, config, ["token_ids"]), strict=True))
        return [tuple(answers[_key(request, index)]["token_ids"]) for index, request in enumerate(requests)]

    def scored(self, kind: str, targets: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """The log-probability of each target behind its context, in the order of `targets`, and whether each of its
        tokens is the likeliest; neither context nor target is empty. Those that end behind the same tokens, such as
        all choices of one token, are one forward."""
        asked: list[Request] = []
        for context_ids, target_ids in targets:
            made = make_scoring(self.model, "", context_ids, target_ids)
            if isinstance(made, Rejected):
                raise EvaluationError(f"a target of {len(target_ids):,} tokens cannot be scored: {made.error}")
            asked.append(made)
        joined, rows = join(asked), list[Row]()
        for index, request in enumerate(each.request for each in joined):
            assert request.scoring is not None, "its tokens are scored"
            parts = (request.scoring.last_ids, request.scoring.decoder_ids or ())
            last, decoder = ("-".join(map(str, ids)) for ids in parts)
            # the id says what is scored, so that a run that goes on scores the same
            name = f"{index}/{request.scoring.num_positions}/{last}{decoder and f'/{decoder}'}"
            rows.append(replace(_ROW, index=index, id=name, prompt_ids=request.prompt_ids))
        sampling = replace(self._config.sampling, logprobs=1, max_new_tokens=0)
        task = Task(
            directory=self.directory / kind,
            columns=partial(score_schema, has_top=True),
            requests=lambda _, pending: [[replace(joined[row.index].request, id=row.id)] for row, _ in pending],
            rows=lambda *_: rows,
        )
        columns = ["token_logprobs", "top_token_ids"]
        answers = self._answers(task, replace(self._config, sampling=sampling), columns)
        found: dict[int, tuple[float, bool]] = {}
        for each, answer in zip(joined, answers, strict=True):
            for member in each.members:
                scoring, request = each.request.scoring, asked[member]
                assert scoring is not None and request.scoring is not None, "their tokens are scored"  # noqa: PT018
                places = scoring.places_of(request.scoring)
                likeliest = [answer["top_token_ids"][place][0] for place in places]
                logprob = math.fsum(answer["token_logprobs"][place] for place in places)
                found[member] = (logprob, likeliest == list(request.target_ids))
        return [found[member] for member in range(len(targets))]

    def _answers(self, task: Task, config: GenerateConfig, columns: Sequence[str]) -> list[dict[str, Any]]:
        """What the rows of a task come to, in their order."""
        outcome = perform(task, config, self._should_stop, self._start)
        read = pq.read_table(RunDirectory(path=outcome.directory).generations, columns=["row_index", "error", *columns])
        answers = read.sort_by("row_index").to_pylist()
        broken = [answer for answer in answers if answer["error"] is not None]
        if broken:
            what = f"{len(broken)} of {len(answers)} requests have no answer; request {broken[0]['row_index']}: "
            raise EvaluationError(f"{outcome.directory}: {what}{broken[0]['error']}")
        return answers


def _own_stops(runtime: Runtime, asked: Sequence[tuple[Row, Prompt]]) -> Iterator[list[Request | Rejected]]:
    """Requests whose stop strings count in the completion alone, as in the harness' own models."""
    for made in completions_of(runtime, asked):
        yield [replace(each, stops_begin_in_prompt=False) if isinstance(each, Request) else each for each in made]


def _key(request: Generation, index: int) -> tuple[Generation, int | None]:
    """Two that are drawn are two, however alike."""
    return request, index if request.temperature else None
