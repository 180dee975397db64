"""Scoring as a run's task: log-probabilities of each row's targets after its prompt, or of a whole document."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.parquet as pq

from runtime.library.api import Runtime
from runtime.requests.prompts import Rejected
from runtime.requests.scoring import PairIds, TextPair, TextSize, document_windows, encode_pairs, make_scoring
from runtime.sequences.sequence import Request

from ...config.settings import ScoreConfig, ScoreSettings, run_directory
from ...datasets import Row
from ...datasets.rows import read_targets, target_problem
from ...files.publishing import JsonValue
from ...record.output_rows import score_schema
from ...record.part_files import visible_files
from ...record.passes import Start
from ...record.summary import PERPLEXITIES, Outcome
from ..requests import Prompt
from ..run import run_task
from .task import Task

MAX_EXPONENT = 700.0  # exp() of more overflows float64
RequestLists: TypeAlias = Iterable[Sequence[Request | Rejected]]


def scoring_task(config: ScoreConfig) -> tuple[Task, ScoreConfig]:
    """The task, with an output row for each target or document window, and its settings with `logprobs` of at least 1,
    which `is_greedy` needs."""
    sampling, settings = config.sampling, config.score
    task = Task(
        directory=run_directory(config),
        columns=lambda _: score_schema(has_top=sampling.logprobs > 0),
        requests=partial(document_requests if settings.rolling else target_requests, settings),
        problem=lambda row: row.error if settings.rolling else target_problem(row, settings.target_field),
        totals=lambda directory, read: Totals.from_parts(directory, read() if settings.rolling else ()).to_plain(),
    )
    num_logprobs = max(1, sampling.logprobs)
    return task, replace(config, sampling=replace(sampling, logprobs=num_logprobs, max_new_tokens=0))


def score(config: ScoreConfig, should_stop: Callable[[], bool], start: Start | None = None) -> Outcome:
    """Runs the scoring task; see `run_task`."""
    return run_task(*scoring_task(config), should_stop, start)


def target_requests(settings: ScoreSettings, runtime: Runtime, prompts: Sequence[tuple[Row, Prompt]]) -> RequestLists:
    """The requests for each row's targets, in order."""
    targets = [read_targets(row, settings.target_field) for row, _ in prompts]
    pairs = [
        TextPair(prompt=prompt, targets=() if isinstance(texts, str) else texts, is_rendered=row.messages is not None)
        for (row, prompt), texts in zip(prompts, targets, strict=True)
    ]
    for (row, _), texts, pair_ids in zip(prompts, targets, encode_pairs(runtime.model, pairs), strict=True):
        if isinstance(texts, str):
            yield [Rejected(id=row.id, error=texts)]
        else:
            yield [_scoring_request(runtime, row, index, ids) for index, ids in enumerate(pair_ids)]


def document_requests(settings: ScoreSettings, runtime: Runtime, prompts: Sequence[tuple[Row, Prompt]]) -> RequestLists:
    """The requests for the windows of each row's prompt, scored as one document."""
    windows_by_row = document_windows(runtime.model, [prompt for _, prompt in prompts], settings.window_tokens)
    for (row, _), windows in zip(prompts, windows_by_row, strict=True):
        items = [windows] if isinstance(windows, str) else windows  # a text is an error message
        yield [_scoring_request(runtime, row, index, item) for index, item in enumerate(items)]


def _scoring_request(runtime: Runtime, row: Row, index: int, ids: PairIds | str) -> Request | Rejected:
    if isinstance(ids, str):
        return Rejected(id=row.id, error=ids, sample_index=index)
    prompt_ids, target_ids = ids
    return make_scoring(runtime.model, row.id, prompt_ids, target_ids, index=index)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Totals over the scored rows of a run, which are targets or windows. `logprob`: the sum. `size`: of the documents;
    None without documents, or if some are not texts or not completely scored."""

    num_rows: int
    num_tokens: int
    num_greedy: int
    logprob: float
    size: TextSize | None = None

    def perplexity(self, count: int | None) -> float | None:
        """Perplexity per token, word or byte, given the `count` of these; None if it is 0 or None."""
        return math.exp(min(-self.logprob / count, MAX_EXPONENT)) if count else None

    @staticmethod
    def from_parts(directory: Path, documents: Sequence[Row] = ()) -> "Totals":
        """The totals of a run's parts. A document with an error in any window does not count."""
        failed_rows = (
            {row["row_index"] for row in _read_scores(directory) if row["logprob"] is None} if documents else set[int]()
        )
        scored, counts = set[int](), Counter[str]()

        def complete_logprobs() -> Iterator[float]:
            for row in _read_scores(directory):
                if row["logprob"] is not None and row["row_index"] not in failed_rows:
                    counts.update(rows=1, tokens=row["num_target_tokens"], greedy=row["is_greedy"])
                    scored.update([row["row_index"]] if documents else ())
                    yield row["logprob"]

        logprob = math.fsum(complete_logprobs())
        whole = [row for row in documents if row.index in scored]
        sizes = [TextSize.from_text(row.prompt) for row in whole if row.messages is None and row.prompt_ids is None]
        return Totals(
            num_rows=counts["rows"],
            num_tokens=counts["tokens"],
            num_greedy=counts["greedy"],
            logprob=logprob,
            size=TextSize.total(sizes) if sizes and len(sizes) == len(whole) else None,
        )

    @property
    def perplexities(self) -> dict[str, float | None]:
        """Perplexities as in lm-eval: exp of minus the log-probability per token, word or byte of all documents."""
        size, counts = self.size, [self.num_tokens]
        counts += [size.num_words, size.num_bytes] if size is not None else []
        return {name: self.perplexity(count) for name, count in zip(PERPLEXITIES, counts, strict=False)}

    def to_plain(self) -> dict[str, JsonValue]:
        """The totals as in `summary.json`."""
        values = asdict(self)
        size = values.pop("size")
        return {**values, **(size or {}), **self.perplexities}


def _read_scores(directory: Path) -> Iterator[dict[str, Any]]:
    columns = ["row_index", "logprob", "is_greedy", "num_target_tokens"]
    for path in visible_files(directory / "generations"):
        yield from pq.read_table(path, columns=columns).to_pylist()
