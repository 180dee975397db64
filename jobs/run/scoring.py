"""Scoring as a run's task: the log-probability of each row's targets behind its prompt, or of a whole document."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from runtime.api import Runtime
from runtime.engine.requests import Rejected
from runtime.engine.scoring_requests import make_scoring
from runtime.engine.sequence import Request
from runtime.engine.text_pairs import PairIds, TextPair, encode_pairs, rolling_windows, text_start

from ..config.settings import ScoreConfig, ScoreSettings, run_directory
from ..datasets import Row
from .generation import Outcome, Task, perform
from .output_rows import score_schema
from .passes import Start


def scoring(config: ScoreConfig) -> Task:
    """A row of scores for each target of each row, or for each window of each document."""
    return Task(
        directory=run_directory(config),
        columns=partial(score_schema, has_top=config.sampling.logprobs > 0),
        request=partial(windows_of if config.score.rolling else targets_of, config.score),
    )


def score(config: ScoreConfig, should_stop: Callable[[], bool], start: Start | None = None) -> Outcome:
    """`perform`, for scores. The likeliest token in place of each is always asked for: it says what is greedy."""
    task, sampling = scoring(config), config.sampling
    asked = replace(config, sampling=replace(sampling, logprobs=max(1, sampling.logprobs), max_new_tokens=0))
    return perform(task, asked, should_stop, start)


def targets_of(
    settings: ScoreSettings, runtime: Runtime, row: Row, prompt_ids: Sequence[int]
) -> Sequence[Request | Rejected]:
    """The requests for the row's targets, in their order."""
    name = settings.target_field
    value = row.columns.get(name)
    targets = [value] if isinstance(value, str) else value
    texts = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
    if not texts or not isinstance(targets, list) or len(texts) < len(targets):
        there = "there is no field" if value is None else "neither a text nor a list of texts is in the field"
        return [Rejected(id=row.id, error=f"{there} {name!r} (score.target_field)")]
    is_plain = row.messages is None and row.prompt_ids is None
    pair = TextPair(prompt=row.prompt if is_plain else prompt_ids, targets=texts)
    [found] = encode_pairs(runtime.model, [pair])
    return [_made(runtime, row, index, ids) for index, ids in enumerate(found)]


def windows_of(
    settings: ScoreSettings, runtime: Runtime, row: Row, prompt_ids: Sequence[int]
) -> Sequence[Request | Rejected]:
    """The requests for the windows that the row's prompt is scored in, as one document."""
    start = text_start(runtime.model)
    if start is None:
        return [Rejected(id=row.id, error="the tokenizer has no token that a document begins or ends with")]
    is_plain = row.messages is None and row.prompt_ids is None
    ids = runtime.tokenize([row.prompt], is_rendered=True)[0] if is_plain else tuple(prompt_ids)
    room = min(settings.window_tokens or runtime.model.shape.context_tokens, runtime.model.shape.context_tokens)
    return [_made(runtime, row, index, window) for index, window in enumerate(rolling_windows(ids, start, room))]


def _made(runtime: Runtime, row: Row, index: int, ids: PairIds | str) -> Request | Rejected:
    if isinstance(ids, str):
        return Rejected(id=row.id, error=ids, sample_index=index)
    return make_scoring(runtime.model, row.id, ids.prompt, ids.target, index=index)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What the scored rows of a run come to together."""

    num_rows: int
    num_tokens: int
    num_greedy: int
    logprob: float

    @property
    def perplexity(self) -> float:
        """The perplexity per token; NaN where nothing was scored."""
        return math.exp(-self.logprob / self.num_tokens) if self.num_tokens else math.nan

    @staticmethod
    def of(directory: Path) -> "Totals":
        """The totals of a run's parts."""
        rows = pq.read_table(directory / "generations", columns=["logprob", "is_greedy", "num_target_tokens"])
        good = [row for row in rows.to_pylist() if row["logprob"] is not None]
        return Totals(
            num_rows=len(good),
            num_tokens=sum(row["num_target_tokens"] for row in good),
            num_greedy=sum(row["is_greedy"] for row in good),
            logprob=math.fsum(row["logprob"] for row in good),
        )

    def __str__(self) -> str:
        return (
            f"{self.num_rows:,} targets of {self.num_tokens:,} tokens, {self.num_greedy:,} of them greedy; "
            f"log-probability {self.logprob:,.4f}, perplexity per token {self.perplexity:,.4f}"
        )
