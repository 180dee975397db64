"""A harness' requests as runs: each kind of them has a run directory, which goes on where it was stopped."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What is generated behind a context. `sampling`: settings of the run that the request is in; greedy with
    `temperature` 0."""

    context_ids: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...]
    temperature: float = 0.0
    sampling: tuple[tuple[str, Any], ...] = ()

    def row(self, index: int) -> Row:
        overrides = SamplingOverrides(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, stop=list(self.stop)
        )
        return replace(_ROW, index=index, id=str(index), prompt_ids=self.context_ids, overrides=overrides)


@dataclass(frozen=True, kw_only=True)
class TargetTokens:
    """Tokens whose log-probability behind a context is asked. Neither is empty."""

    context_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TargetScore:
    """`logprob` of the whole target; `is_greedy`: each of its tokens is the likeliest."""

    logprob: float
    is_greedy: bool


_ROW = Row(index=0, id="", prompt="", messages=None, columns={}, error=None)


def _row(request: Request, index: int) -> Row:
    """The row whose id says what is scored, so that a run that goes on scores the same."""
    assert request.scoring is not None, "its tokens are scored"
    last, decoder = ("-".join(map(str, ids)) for ids in (request.scoring.last_ids, request.scoring.decoder_ids or ()))
    name = f"{index}/{request.scoring.num_positions}/{last}{decoder and f'/{decoder}'}"
    return replace(_ROW, index=index, id=name, prompt_ids=request.prompt_ids)


def _scored(request: Request, joined: Request, answer: Mapping[str, Any]) -> TargetScore:
    """The score of one target, of what the row of the request that it was joined in has come to."""
    assert request.scoring is not None, "its tokens are scored"
    assert joined.scoring is not None, "it was joined of scored ones"
    places = joined.scoring.places_of(request.scoring)
    likeliest = [answer["top_token_ids"][place][0] for place in places]
    return TargetScore(
        logprob=math.fsum(answer["token_logprobs"][place] for place in places),
        is_greedy=likeliest == list(request.target_ids),
    )


class Answerer:
    """Answers the requests of one evaluation, whose runs lie in `directory`; those that an earlier start has answered
    are read. Raises the errors of runtime.errors."""

    def __init__(self, config: GenerateConfig, directory: Path, should_stop: Callable[[], bool], start: Start):
        self._config, self.directory = config, directory
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
        rows = [request.row(index) for index, request in enumerate(distinct.values())]
        task = replace(generation(config), directory=self.directory / kind, rows=lambda *_: rows, requests=_own_stops)
        answers = dict(zip(distinct, self._answers(task, config, ["token_ids"]), strict=True))
        return [tuple(answers[_key(request, index)]["token_ids"]) for index, request in enumerate(requests)]

    def scored(self, kind: str, targets: Sequence[TargetTokens]) -> list[TargetScore]:
        """The score of each target, in the order of `targets`. Those that end behind the same tokens, such as all
        choices of one token, are one forward."""
        asked: list[Request] = []
        for target in targets:
            made = make_scoring(self.model, "", target.context_ids, target.target_ids)
            if isinstance(made, Rejected):
                raise EvaluationError(f"a target of {len(target.target_ids):,} tokens cannot be scored: {made.error}")
            asked.append(made)
        joined = join(asked)
        rows = [_row(each.request, index) for index, each in enumerate(joined)]
        sampling = replace(self._config.sampling, logprobs=1, max_new_tokens=0)
        task = Task(
            directory=self.directory / kind,
            columns=partial(score_schema, has_top=True),
            requests=lambda _, pending: [[replace(joined[row.index].request, id=row.id)] for row, _ in pending],
            rows=lambda *_: rows,
        )
        columns = ["token_logprobs", "top_token_ids"]
        answers = self._answers(task, replace(self._config, sampling=sampling), columns)
        found: dict[int, TargetScore] = {}
        for each, answer in zip(joined, answers, strict=True):
            found |= {member: _scored(asked[member], each.request, answer) for member in each.members}
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
