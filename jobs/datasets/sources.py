"""`read_rows`: from a data set's config to the rows of a run."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from runtime.config import SamplingOverrides
from runtime.errors import ConfigError, DatasetError, require

from . import helm_reasoning, helm_summarization
from .config import MAX_ROWS, DatasetConfig, DatasetKind
from .helm_summarization import CountTokens
from .jsonl import read_jsonl
from .overrides import AS_THE_RUN, read_overrides
from .records import (
    BadRecord,
    Content,
    Fields,
    ReadContent,
    Record,
    add_chat,
    read_content,
    read_first_turn,
    read_id,
)
from .rows import Row, number_rows, refuse_bad_rows, repeat_rows, resolve_duplicates, warn_of_empty_fields
from .tables import read_csv, read_hub, read_parquet

SAMPLE_PATH = Path(__file__).parents[1] / "data" / "sample.jsonl"
MT_BENCH_ID = "question_id"

_READERS: dict[DatasetKind, Callable[[DatasetConfig], Iterator[Record]]] = {
    DatasetKind.sample: lambda config: read_jsonl(str(SAMPLE_PATH)),
    DatasetKind.mtbench: lambda config: read_jsonl(config.path or "", max_row_bytes=config.max_row_bytes),
    DatasetKind.jsonl: lambda config: read_jsonl(
        config.path or "", config.json_field, max_row_bytes=config.max_row_bytes
    ),
    DatasetKind.parquet: read_parquet,
    DatasetKind.csv: read_csv,
    DatasetKind.hub: read_hub,
}


def read_rows(config: DatasetConfig, *, count_tokens: CountTokens | None = None) -> list[Row]:
    """All rows of a data set: limited, repeated, with distinct ids, in an order that only the input decides.

    `count_tokens` counts a prompt's tokens as the model will see it; needed for `dataset.window_tokens` only.
    Raises ConfigError when it is missing, DatasetError when the data set as a whole cannot be used: not there, not
    readable, empty, a column missing, ids that repeat (`dedupe=refuse`), a bad row (`on_bad_row=fail`).
    """
    rows = list(islice(_read(config, count_tokens), config.limit))
    if not rows:
        raise DatasetError(f"dataset.path={config.path} holds no rows (dataset.kind={config.kind.value})")
    require(
        len(rows) * config.repeat <= MAX_ROWS,
        f"dataset.repeat={config.repeat:,} times {len(rows):,} rows is above the {MAX_ROWS:,} that a run can have",
    )
    refuse_bad_rows(rows, config.on_bad_row)
    warn_of_empty_fields(rows, config)
    return number_rows(resolve_duplicates(repeat_rows(rows, config.repeat), config.dedupe))


def _read(config: DatasetConfig, count_tokens: CountTokens | None) -> Iterator[Row]:
    if config.kind is DatasetKind.helm_synthetic_reasoning:
        return _read_reasoning(config)
    if config.kind is DatasetKind.helm_summarization:
        return _read_summarization(config, count_tokens)
    records = enumerate(_READERS[config.kind](config))
    if config.kind in (DatasetKind.sample, DatasetKind.mtbench):
        return _make_rows(records, config, read_first_turn, MT_BENCH_ID)
    return _make_rows(records, config, partial(read_content, config=config), config.id_field)


def _read_reasoning(config: DatasetConfig) -> Iterator[Row]:
    prompts = helm_reasoning.build_prompts(config.mode, config.num_examples, config.trial)
    for index, item in enumerate(prompts):
        content = Content(prompt=item.input, reference=item.answer)
        yield _make_row(index, f"{config.mode.value}-{index}", content, {}, config)


def _read_summarization(config: DatasetConfig, count_tokens: CountTokens | None) -> Iterator[Row]:
    if config.window_tokens is not None and count_tokens is None:
        raise ConfigError("dataset.window_tokens needs a tokenizer to count with; pass count_tokens, or set it to null")
    counter = count_tokens or len
    most = config.max_row_bytes
    records = list(read_jsonl(config.path or "", config.json_field, max_row_bytes=most))
    if config.examples_path is None:
        chosen = helm_summarization.select_examples(records, config)
        asked = ((number, record) for number, record in enumerate(records) if number not in chosen)
    else:
        others = list(read_jsonl(config.examples_path, config.json_field, key="examples_path", max_row_bytes=most))
        chosen = helm_summarization.select_examples(others, config)
        asked = enumerate(records)
    examples = list(chosen.values())

    def content_of(fields: Fields) -> Content:
        item = helm_summarization.read_item(fields, config)
        return helm_summarization.build_content(item, examples, config, counter)

    yield from _make_rows(asked, config, content_of, config.id_field)


def _make_rows(
    records: Iterable[tuple[int, Record]], config: DatasetConfig, content_of: ReadContent, id_field: str | None
) -> Iterator[Row]:
    for index, record in records:
        yield _row_of(record, index, config, content_of, id_field)


def _row_of(record: Record, index: int, config: DatasetConfig, content_of: ReadContent, id_field: str | None) -> Row:
    """A record's row; whatever is wrong with the record, the row has the best id there is."""
    row_id, former_id = (str(index), None) if id_field is None else (f"bad-row-{index}", record.name)
    fields = record.fields
    if fields is None:
        return _error_row(index, row_id, former_id, {}, record.error or f"{record.place}: not readable")
    passed = {key: value for key, value in fields.items() if key != id_field} if config.keep_columns else {}
    try:
        row_id, former_id = (row_id if id_field is None else read_id(fields, id_field)), None
        return _make_row(index, row_id, content_of(fields), passed, config, read_overrides(fields, config))
    except BadRecord as error:
        return _error_row(index, row_id, former_id, passed, f"{record.place}: {error}")


def _make_row(
    index: int,
    row_id: str,
    content: Content,
    columns: Fields,
    config: DatasetConfig,
    overrides: SamplingOverrides = AS_THE_RUN,
) -> Row:
    chat = add_chat(content, config)
    if content.reference is not None and config.keep_columns:
        columns = {**columns, "reference": content.reference}
    return Row(
        index=index, id=row_id, prompt=chat.prompt, messages=chat.messages, columns=columns, error=None,
        overrides=overrides,
    )  # fmt: skip


def _error_row(index: int, row_id: str, former_id: str | None, columns: Fields, error: str) -> Row:
    return Row(index=index, id=row_id, prompt="", messages=None, columns=columns, error=error, former_id=former_id)
