"""Makes prompts for a judge of MT-Bench answers (Zheng et al., arXiv 2306.05685).

A judge is a model that grades one answer, or compares the answers of two models. There is a row for each turn of an
answer. In a comparison there are two, because a pair of answers is compared in both orders, called games.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import TypeAlias

import pyarrow.parquet as pq

from runtime.errors import DatasetError

from ..fields import DatasetFields
from ..files import list_files, require_existing_path
from ..records import BadRecord, Content, Fields, Message, Record, check_text, shorten
from ..row_rules import CountTokens, InputKind, make_row
from ..rows import Row
from .jsonl import read_jsonl

log = logging.getLogger(__name__)
REFERENCE_CATEGORIES = frozenset({"math", "reasoning", "coding", "arena-hard-200"})  # judged with a reference
MAX_TURNS = 2  # that the judge prompts support
KEYS = frozenset({"path", "answers_path", "baseline_path", "references_path", "judge_prompts_path"})
NEEDS = "dataset.path=question.jsonl and dataset.answers_path=<run directory or FastChat answers>"
BUNDLED_PROMPTS = Path(__file__).parents[2] / "data" / "judge_prompts.jsonl"
ERROR = "$ERROR$"  # FastChat's marker for a failed answer
# (kind, has a reference, turn): (name of the bundled prompt, name of FastChat's prompt)
PROMPT_NAMES = {
    ("single", False, 1): ("single", "single-v1"),
    ("single", True, 1): ("single-reference", "single-math-v1"),
    ("single", False, 2): ("single-turns", "single-v1-multi-turn"),
    ("single", True, 2): ("single-reference-turns", "single-math-v1-multi-turn"),
    ("pairwise", False, 1): ("pair", "pair-v2"),
    ("pairwise", True, 1): ("pair-reference", "pair-math-v1"),
    ("pairwise", False, 2): ("pair-turns", "pair-v2-multi-turn"),
    ("pairwise", True, 2): ("pair-reference-turns", "pair-math-v1-multi-turn"),
}

TurnAnswers: TypeAlias = Sequence[str | None]  # an answer for each turn; None if it is missing
AnswersByQuestion: TypeAlias = Mapping[str, TurnAnswers]  # by question id


@dataclass(frozen=True, kw_only=True)
class JudgePrompt:
    """A prompt for the judge: a system prompt, and a format string for questions and answers."""

    name: str
    system: str
    template: str

    def fill(self, values: Mapping[str, str]) -> str:
        """Fills the template with `values` by field name. Raises DatasetError if it has an unknown field."""
        filled = ""
        for text, name, _, _ in Formatter().parse(self.template):
            if name is not None and name not in values:
                raise DatasetError(
                    f"judge prompt {self.name} has an unknown field {{{name}}}; known fields: {', '.join(values)}"
                )
            filled += text + (values[name] if name is not None else "")
        return filled


def read_judge_prompts(path: str | None) -> dict[str, JudgePrompt]:
    """Reads judge prompts by name from a file, or the bundled ones. Raises DatasetError."""
    prompts: dict[str, JudgePrompt] = {}
    for record in read_jsonl(path or str(BUNDLED_PROMPTS), key="judge_prompts_path"):
        fields = _require_fields(record)
        try:
            name, system, template = (
                check_text(fields.get(key), shorten(key), may_be_empty=True)
                for key in ("name", "system_prompt", "prompt_template")
            )
        except BadRecord as error:
            raise DatasetError(f"{record.location}: {error}") from None
        prompts[name] = JudgePrompt(name=name, system=system, template=template)
    return prompts


def read_answers(path: str, key: str) -> dict[str, AnswersByQuestion]:
    """Reads the answers of each model from a run or from FastChat files. The name of the directory or file is the name
    of the model. Verifies checksums of a run. Raises DatasetError, also if the run is not finished."""
    root = require_existing_path(path, key)
    # A run, or a directory with a run for each turn.
    directories = [root, *(root / f"turn-{turn}" for turn in range(1, 3))]
    runs = [directory for directory in directories if (directory / "run.json").is_file()]
    if not runs:
        files = list_files(path, (".jsonl",), key)
        return {file.name.removesuffix(".jsonl"): read_answer_file(str(file), key) for file in files}
    answers: dict[str, list[str | None]] = {}
    for run in runs:
        if not (run / "_SUCCESS.json").is_file():
            raise DatasetError(f"dataset.{key}={path}: {run} is not finished: start its command again")
        columns = ["id", "sample_index", "status", "completion"]
        table = pq.read_table(run / "generations", columns=columns, page_checksum_verification=True)
        for row in table.to_pylist():
            if row["sample_index"] == 0:
                answers.setdefault(row["id"], []).append(row["completion"] if row["status"] == "ok" else None)
    return {root.resolve().name: answers}


def read_answer_file(path: str, key: str) -> AnswersByQuestion:
    """The first choice of each question in a FastChat answer file. Raises DatasetError."""
    answers: dict[str, TurnAnswers] = {}
    for record in read_jsonl(path, key=key):
        fields = _require_fields(record)
        choices = fields.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        turns = first.get("turns") if isinstance(first, dict) else None
        if not isinstance(turns, list):
            raise DatasetError(f"{record.location}: no choices with turns: not a FastChat answer (dataset.{key})")
        answers[str(fields.get("question_id"))] = [None if turn == ERROR else str(turn) for turn in turns]
    return answers


def _require_fields(record: Record) -> Fields:
    if record.fields is None:
        raise DatasetError(str(record.error))
    return record.fields


def read_judge_rows(config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
    """Yields rows, sorted by model, question, turn and game. Raises DatasetError if a file has another format."""
    if config.answers_path is None:
        raise DatasetError(f"dataset=mtbench_judge needs {NEEDS}")
    questions = _read_questions(config)
    prompts = read_judge_prompts(config.judge_prompts_path)
    baseline = None
    if config.baseline_path is not None:
        models = read_answers(config.baseline_path, "baseline_path")
        if len(models) > 1:
            raise DatasetError(
                f"dataset.baseline_path={config.baseline_path} has {len(models)} models: set the file of one"
            )
        baseline = next(iter(models.items()))
    index = 0
    for model, answers in read_answers(config.answers_path, "answers_path").items():
        answered = [question for question in questions if question.id in answers]
        if not answered:
            raise DatasetError(f"dataset.answers_path={config.answers_path}: {model} has no answer to any question")
        if len(answered) < len(questions):
            log.warning("%s answers %d of %d questions: only these are judged", model, len(answered), len(questions))
        for question in answered:
            for row in _make_rows(question, model, answers[question.id], baseline, prompts, config):
                yield replace(row, index=index)
                index += 1


KINDS = {"mtbench_judge": InputKind(rows=read_judge_rows, keys=KEYS, needs=NEEDS)}


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A question with its turns (user messages), and a reference answer for each turn, if there are any."""

    record: Record
    id: str
    turns: Sequence[str]
    references: Sequence[str]

    @property
    def fields(self) -> Fields:
        return self.record.fields or {}


def _read_questions(config: DatasetFields) -> list[_Question]:
    """Reads the questions and their reference answers. Raises DatasetError if a question has another format."""
    references_by_id: AnswersByQuestion = {}
    if config.references_path is not None:
        references_by_id = read_answer_file(config.references_path, "references_path")
    questions: list[_Question] = []
    for record in read_jsonl(config.path or "", max_row_bytes=config.max_row_bytes):
        fields = _require_fields(record)
        turns, id, reference = fields.get("turns"), fields.get("question_id"), fields.get("reference")
        if not isinstance(turns, list) or not turns or id is None:
            raise DatasetError(f"{record.location}: no question_id and turns: not an MT-Bench question")
        own = [text for text in (reference if isinstance(reference, list) else [reference]) if isinstance(text, str)]
        references = [text or "" for text in references_by_id.get(str(id), [])] or own  # one for each turn
        references = references if fields.get("category") in REFERENCE_CATEGORIES else ()
        questions.append(
            _Question(record=record, id=str(id), turns=[str(turn) for turn in turns], references=references)
        )
    in_categories = [question for question in questions if question.fields.get("category") in REFERENCE_CATEGORIES]
    if num_without := sum(not question.references for question in in_categories):
        log.warning(
            "%d questions of the categories %s have no reference answer and are judged without: set "
            "dataset.references_path",
            num_without,
            ", ".join(sorted(REFERENCE_CATEGORIES)),
        )
    return questions


def _make_rows(
    question: _Question,
    model: str,
    answers: Sequence[str | None],
    baseline: tuple[str, AnswersByQuestion] | None,
    prompts: Mapping[str, JudgePrompt],
    config: DatasetFields,
) -> Iterator[Row]:
    """Yields the rows of one model's answers to a question. `baseline`: name and answers of the model to compare with;
    None: answers are graded."""
    for turn in range(1, 1 + min(len(question.turns), len(answers), MAX_TURNS)):
        columns: Fields = {
            "question_id": question.fields.get("question_id"),
            "category": question.fields.get("category"),
            "model": model,
            "baseline": None if baseline is None else baseline[0],
            "turn": turn,
        }
        id = f"{model}/{question.id}/{turn}"
        if baseline is None:
            yield _make_row(question, id, {"answer": answers}, prompts, {**columns, "game": None}, config)
            continue
        baseline_answers = baseline[1].get(question.id, ())
        for game, (first, second) in enumerate(((answers, baseline_answers), (baseline_answers, answers)), start=1):
            pair = {"answer_a": first, "answer_b": second}
            yield _make_row(question, f"{id}/{game}", pair, prompts, {**columns, "game": game}, config)


def _make_row(
    question: _Question,
    id: str,
    answers_by_name: Mapping[str, Sequence[str | None]],
    prompts: Mapping[str, JudgePrompt],
    columns: Fields,
    config: DatasetFields,
) -> Row:
    """Makes one row. `answers_by_name`: answers by their field in the template, one or two."""
    turn = 1 if columns["turn"] == 1 else MAX_TURNS
    kind = "single" if len(answers_by_name) == 1 else "pairwise"
    path = config.judge_prompts_path
    name = PROMPT_NAMES[kind, bool(question.references), turn][path is not None]
    if name not in prompts:
        raise DatasetError(f"dataset.judge_prompts_path={path} has no prompt {name}; its prompts: {', '.join(prompts)}")
    prompt = prompts[name]
    columns = {**columns, "prompt_name": prompt.name, "user_prompt": None}
    try:
        values = _template_values(question, answers_by_name, turn)
        text = check_text(prompt.fill(values), "the judge prompt")
    except BadRecord as error:
        return Row(
            index=0,
            id=id,
            prompt="",
            messages=None,
            columns=columns if config.keep_columns else {},
            error=f"{question.record.location}: {error}",
        )
    content = Content(prompt=f"{prompt.system}\n\n{text}" if prompt.system else text)
    if config.chat_template:
        system: list[Message] = [{"role": "system", "content": prompt.system}] if prompt.system else []
        content = Content(messages=[*system, {"role": "user", "content": text}])
    output_columns = {**columns, "user_prompt": text} if config.keep_columns else {}
    return make_row(0, id, content, output_columns, config)


def _template_values(
    question: _Question, answers_by_name: Mapping[str, Sequence[str | None]], turn: int
) -> dict[str, str]:
    """The values for the template, by field name. Raises BadRecord if an answer is missing."""
    values = {f"ref_answer_{number}": text for number, text in enumerate(question.references, start=1)}
    if question.references:
        values.setdefault("ref_answer_2", "")
    values |= {"question": question.turns[0]} if turn == 1 else {}
    values |= {f"question_{number}": text for number, text in enumerate(question.turns, start=1) if turn > 1}
    for name, answers in answers_by_name.items():
        for number in range(1, turn + 1):
            answer = answers[number - 1] if number <= len(answers) else None
            if answer is None:
                raise BadRecord(f"turn {number} of question {question.id} has no answer to judge")
            values[name if turn == 1 else f"{name}_{number}"] = answer
    return values
