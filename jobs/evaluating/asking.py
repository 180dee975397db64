"""A harness' requests as runs: each kind of them has a run directory, which goes on where it was stopped."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from runtime.api import Runtime
from runtime.config import SamplingOverrides
from runtime.engine.sequence import Request, Scoring
from runtime.errors import EvaluationError
from runtime.model.loading import LoadedModel

from ..config.settings import GenerateConfig
from ..datasets import Row
from ..run.generation import Task, generation, perform
from ..run.output_rows import score_schema
from ..run.passes import Start
from ..run.run_dir import RunDirectory


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
class Target:
    """Tokens whose log-probability behind a context is asked. Neither is empty."""

    context_ids: tuple[int, ...]
    target_ids: tuple[int, ...]

    @property
    def computed_ids(self) -> tuple[int, ...]:
        """What the last token of the target follows on."""
        return (*self.context_ids, *self.target_ids[:-1])


@dataclass(frozen=True, kw_only=True)
class Scored:
    """`logprob` of the whole target; `is_greedy`: each of its tokens is the likeliest."""

    logprob: float
    is_greedy: bool


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Targets whose scores one forward gives: all of them end behind the same tokens, `ids`. `num_positions`: tokens of
    the longest; `last_ids`: the last token of each, without repeats."""

    ids: tuple[int, ...]
    num_positions: int
    last_ids: tuple[int, ...]

    @staticmethod
    def of(targets: Sequence[Target]) -> "_Group":
        return _Group(
            ids=targets[0].computed_ids,
            num_positions=max(len(target.target_ids) for target in targets),
            last_ids=tuple(dict.fromkeys(target.target_ids[-1] for target in targets)),
        )

    def row(self, index: int) -> Row:
        """The row whose id says what is scored, so that a run that goes on scores the same."""
        name = f"{index}/{self.num_positions}/{'-'.join(map(str, self.last_ids))}"
        return replace(_ROW, index=index, id=name, prompt_ids=self.ids)

    def request(self, id: str) -> Request:
        scoring = Scoring(num_positions=self.num_positions, last_ids=self.last_ids)
        return Request(id=id, prompt_ids=self.ids, max_new_tokens=1, scoring=scoring)

    def scored(self, target: Target, answer: Mapping[str, Any]) -> Scored:
        """The score of one of the targets, of what the row came to."""
        num_before, last = self.num_positions - 1, self.last_ids.index(target.target_ids[-1])
        places = [*range(self.num_positions - len(target.target_ids), num_before), num_before + last]
        likeliest = [answer["top_token_ids"][place][0] for place in places]
        return Scored(
            logprob=math.fsum(answer["token_logprobs"][place] for place in places),
            is_greedy=likeliest == list(target.target_ids),
        )


_ROW = Row(index=0, id="", prompt="", messages=None, columns={}, error=None)


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
        task = replace(generation(config), directory=self.directory / kind, rows=lambda *_: rows)
        answers = dict(zip(distinct, self._answers(task, config, ["token_ids"]), strict=True))
        return [tuple(answers[_key(request, index)]["token_ids"]) for index, request in enumerate(requests)]

    def scored(self, kind: str, targets: Sequence[Target]) -> list[Scored]:
        """The score of each target, in the order of `targets`. Those that end behind the same tokens, such as all
        choices of one token, are one forward."""
        members: dict[tuple[int, ...], list[Target]] = {}
        for target in targets:
            members.setdefault(target.computed_ids, []).append(target)
        groups = {ids: _Group.of(each) for ids, each in members.items()}
        of_rows = list(groups.values())
        sampling = replace(self._config.sampling, logprobs=1, max_new_tokens=0)
        task = Task(
            directory=self.directory / kind,
            columns=partial(score_schema, has_top=True),
            request=lambda runtime, row, ids: [of_rows[row.index].request(row.id)],
            rows=lambda *_: [group.row(index) for index, group in enumerate(of_rows)],
        )
        columns = ["token_logprobs", "top_token_ids"]
        answers = dict(zip(groups, self._answers(task, replace(self._config, sampling=sampling), columns), strict=True))
        return [groups[target.computed_ids].scored(target, answers[target.computed_ids]) for target in targets]

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


def _key(request: Generation, index: int) -> tuple[Generation, int | None]:
    """Two that are drawn are two, however alike."""
    return request, index if request.temperature else None
