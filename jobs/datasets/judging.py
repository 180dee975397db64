"""What a judge is shown: questions, answers to them, right answers, and the prompts that these are put into, in
FastChat's forms; answers also as our own runs have them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import TypeAlias

import pyarrow.parquet as pq

from runtime.errors import DatasetError

from .files import list_files, require_there
from .kinds.jsonl import read_jsonl
from .records import BadRecord, Fields, Json, Record, check_text, shorten

OWN_PROMPTS = Path(__file__).parents[1] / "data" / "judge_prompts.jsonl"
ERROR = "$ERROR$"  # in place of an answer, in FastChat's files
# Of a question with a reference beside it or not, and of the second turn or not.
NAMES = {
    ("single", False, 1): ("single", "single-v1"),
    ("single", True, 1): ("single-reference", "single-math-v1"),
    ("single", False, 2): ("single-turns", "single-v1-multi-turn"),
    ("single", True, 2): ("single-reference-turns", "single-math-v1-multi-turn"),
    ("pairwise", False, 1): ("pair", "pair-v2"),
    ("pairwise", True, 1): ("pair-reference", "pair-math-v1"),
    ("pairwise", False, 2): ("pair-turns", "pair-v2-multi-turn"),
    ("pairwise", True, 2): ("pair-reference-turns", "pair-math-v1-multi-turn"),
}

Turns: TypeAlias = Sequence[str | None]  # the answer to each turn; None where there is none
ByQuestion: TypeAlias = Mapping[str, Turns]


@dataclass(frozen=True, kw_only=True)
class JudgePrompt:
    name: str
    system: str
    template: str

    def fill(self, values: Mapping[str, str]) -> str:
        """Raises DatasetError naming a place in the template that nothing belongs into."""
        made = ""
        for text, name, _, _ in Formatter().parse(self.template):
            if name is not None and name not in values:
                known = ", ".join(values)
                raise DatasetError(f"the judge's prompt {self.name} has a place {{{name}}}: there are {known}")
            made += text + (values[name] if name is not None else "")
        return made


@dataclass(frozen=True, kw_only=True)
class JudgePrompts:
    """Those of a file, by name. `is_own`: our words, under our names."""

    of: Mapping[str, JudgePrompt]
    where: str
    is_own: bool

    def choose(self, kind: str, has_reference: bool, turn: int) -> JudgePrompt:
        """Raises DatasetError where the file lacks it."""
        name = NAMES[kind, has_reference, turn][not self.is_own]
        if name not in self.of:
            raise DatasetError(f"{self.where} has no prompt {name}; it has {', '.join(self.of)}")
        return self.of[name]


def read_judge_prompts(path: str | None) -> JudgePrompts:
    """Raises DatasetError."""
    where = f"dataset.judge_prompts_path={path}"
    found: dict[str, JudgePrompt] = {}
    for record in read_jsonl(path or str(OWN_PROMPTS), key="judge_prompts_path"):
        name, system, template = (_text(record, key) for key in ("name", "system_prompt", "prompt_template"))
        found[name] = JudgePrompt(name=name, system=system, template=template)
    return JudgePrompts(of=found, where=where, is_own=path is None)


def read_answers(path: str, key: str) -> dict[str, ByQuestion]:
    """The answers of each model, by question: those of a run, whose directory is the model's name, or of files of
    FastChat's, each called as its model. Raises DatasetError."""
    root = require_there(path, key)
    if root.is_dir() and (runs := _runs_at(root)):
        return {root.resolve().name: _of_runs(runs, f"dataset.{key}={path}")}
    files = list_files(path, (".jsonl",), key)
    return {file.name.removesuffix(".jsonl"): read_answer_file(str(file), key) for file in files}


def read_answer_file(path: str, key: str) -> ByQuestion:
    """The first choice of each question, in FastChat's form. Raises DatasetError."""
    found: dict[str, Turns] = {}
    for record in read_jsonl(path, key=key):
        fields = _fields(record)
        choices = fields.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        turns = first.get("turns") if isinstance(first, dict) else None
        if not isinstance(turns, list):
            raise DatasetError(f"{record.place}: no choices with turns, which FastChat's answers have (dataset.{key})")
        found[str(fields.get("question_id"))] = [None if turn == ERROR else str(turn) for turn in turns]
    return found


def _runs_at(root: Path) -> list[Path]:
    """The directories of a run's turns, or the run itself; none where there is no run."""
    places = [root, *(root / f"turn-{turn}" for turn in range(1, 3))]
    return [place for place in places if (place / "run.json").is_file()]


def _of_runs(runs: Sequence[Path], where: str) -> ByQuestion:
    """The parts' own checksums are verified. Raises DatasetError for a run that is not finished."""
    found: dict[str, list[str | None]] = {}
    for run in runs:
        if not (run / "_SUCCESS.json").is_file():
            raise DatasetError(f"{where}: {run} is not finished; the run's own command goes on with it")
        columns = ["id", "sample_index", "status", "completion"]
        table = pq.read_table(run / "generations", columns=columns, page_checksum_verification=True)
        for row in table.to_pylist():
            if row["sample_index"] == 0:
                found.setdefault(row["id"], []).append(row["completion"] if row["status"] == "ok" else None)
    return found


def references_of(question: Fields) -> list[str]:
    """The field `reference` of a question: a text, or one for each turn."""
    value = question.get("reference")
    texts: list[Json] = value if isinstance(value, list) else [value]
    return [text for text in texts if isinstance(text, str)]


def questions(path: str, max_row_bytes: int) -> Iterator[tuple[Record, str, list[str]]]:
    """Each question, its id and its turns. Raises DatasetError for one in another form: nothing could be judged by
    it."""
    for record in read_jsonl(path, max_row_bytes=max_row_bytes):
        fields = _fields(record)
        turns, id = fields.get("turns"), fields.get("question_id")
        if not isinstance(turns, list) or not turns or id is None:
            raise DatasetError(f"{record.place}: no question_id and turns: not a question in MT-Bench's form")
        yield record, str(id), [str(turn) for turn in turns]


def _text(record: Record, key: str) -> str:
    try:
        return check_text(_fields(record).get(key), shorten(key), may_be_empty=True)
    except BadRecord as error:
        raise DatasetError(f"{record.place}: {error}") from None


def _fields(record: Record) -> Fields:
    if record.fields is None:
        raise DatasetError(str(record.error))
    return record.fields
