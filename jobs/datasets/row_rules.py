"""Row rules: how records become rows. A rule takes the settings and yields rows, numbered from 0 in the input's order;
what is wrong with one record becomes the error of its row.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from runtime.config import SamplingOverrides
from runtime.errors import ConfigError

from . import helm_reasoning, helm_summarization
from .fields import DatasetFields
from .helm_summarization import CountTokens
from .jsonl import read_jsonl
from .records import (
    AS_THE_RUN,
    BadRecord,
    Content,
    Fields,
    ReadContent,
    Record,
    add_chat,
    read_content,
    read_first_turn,
    read_id,
    read_overrides,
)
from .rows import Row

MT_BENCH_ID = "question_id"

ReadRecords: TypeAlias = Callable[[DatasetFields], Iterator[Record]]


def read_prompts(read: ReadRecords, config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
    """A row for each record that `read` yields: the prompt or the messages in the fields that the config names."""
    return _make_rows(enumerate(read(config)), config, partial(read_content, config=config), config.id_field)


def read_questions(read: ReadRecords, config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
    """MT-Bench's questions: the first turn of each, as raw text, by its `question_id`."""
    return _make_rows(enumerate(read(config)), config, read_first_turn, MT_BENCH_ID)


def read_reasoning(config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
    """HELM's synthetic reasoning: prompts that rules make, no input is read."""
    prompts = helm_reasoning.build_prompts(config.mode, config.num_examples, config.trial)
    for index, item in enumerate(prompts):
        content = Content(prompt=item.input, reference=item.answer)
        yield _make_row(index, f"{config.mode.value}-{index}", content, {}, config)


def read_summarization(config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
    """HELM's summarization: prompts with examples in front, cut to the window. Raises ConfigError without a counter."""
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
    records: Iterable[tuple[int, Record]], config: DatasetFields, content_of: ReadContent, id_field: str | None
) -> Iterator[Row]:
    for index, record in records:
        yield replace(_row_of(record, index, config, content_of, id_field), source_file=record.source)


def _row_of(record: Record, index: int, config: DatasetFields, content_of: ReadContent, id_field: str | None) -> Row:
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
    config: DatasetFields,
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
