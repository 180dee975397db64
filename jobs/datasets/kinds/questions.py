"""Reads MT-Bench questions, bundled questions in their format, the tasks of the bundled model, and `dataset.prompt`."""

from collections.abc import Iterator
from pathlib import Path

from runtime.errors import DatasetError

from ..fields import DatasetFields, Turns
from ..records import BadRecord, Content, Fields, check_text, make_turns_content, read_prompt
from ..row_rules import CountTokens, InputKind, ReadRecords, make_row, make_rows
from ..rows import Row
from .jsonl import read_jsonl, read_jsonl_path

DATA = Path(__file__).parents[2] / "data"
SAMPLE_PATH, TASKS_PATH = DATA / "sample.jsonl", DATA / "tasks.jsonl"
MT_BENCH_ID = "question_id"


def _read_questions(read: ReadRecords, config: DatasetFields) -> Iterator[Row]:
    """Yields a row for each question, with the text of its first turn as prompt, as MoE-Lightning does, and
    `question_id` as id. With `turns=all`, it also has the later turns."""

    def read_content(fields: Fields) -> Content:
        turns = fields.get("turns")
        if not isinstance(turns, list) or not turns:
            raise BadRecord("the field 'turns' is not a list of texts: not an MT-Bench question")
        return make_turns_content(turns if config.turns is Turns.all else turns[:1], "turn")

    return make_rows(enumerate(read(config)), config, read_content, MT_BENCH_ID)


def _read_tasks(config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
    records = enumerate(read_jsonl(str(TASKS_PATH)))
    return make_rows(records, config, lambda fields: Content(prompt=read_prompt(fields, "prompt")), "id")


def _read_prompt_setting(config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
    try:
        prompt = check_text(config.prompt, "dataset.prompt")
    except BadRecord as error:
        raise DatasetError(str(error)) from error
    yield make_row(0, "0", Content(prompt=prompt), {}, config)


KINDS = {
    "prompt": InputKind(rows=_read_prompt_setting, keys=frozenset({"prompt"})),
    "sample": InputKind(rows=lambda config, _: _read_questions(lambda _: read_jsonl(str(SAMPLE_PATH)), config)),
    "tasks": InputKind(rows=_read_tasks),
    "mtbench": InputKind(
        rows=lambda config, _: _read_questions(read_jsonl_path, config),
        keys=frozenset({"path", "turns"}),
        needs="dataset.path=question.jsonl (MT-Bench questions; not bundled)",
    ),
}
