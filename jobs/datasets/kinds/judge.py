"""Answers to MT-Bench's questions as prompts for a judge: a row for each answer and turn, or for both orders of a pair
(Zheng et al., arXiv 2306.05685).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from runtime.errors import DatasetError

from ..fields import DatasetFields
from ..judging import (
    ByQuestion,
    JudgePrompts,
    questions,
    read_answer_file,
    read_answers,
    read_judge_prompts,
    references_of,
)
from ..records import BadRecord, Content, Fields, Message, Record, check_text
from ..row_rules import CountTokens, Kind, make_row
from ..rows import Row

log = logging.getLogger(__name__)
WITH_REFERENCES = frozenset({"math", "reasoning", "coding", "arena-hard-200"})  # categories, as FastChat has them
MAX_TURNS = 2  # what the judge's prompts have places for
KEYS = frozenset({"path", "answers_path", "baseline_path", "references_path", "judge_prompts_path"})
NEEDS = "dataset.path=question.jsonl and dataset.answers_path=<a run, or FastChat's answers>"


def read_judged(config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
    """Rows by model, question, turn and game. Raises DatasetError for files in other forms."""
    if config.answers_path is None:
        raise DatasetError(f"dataset=mtbench_judge needs {NEEDS}")
    asked = _asked(config)
    prompts = read_judge_prompts(config.judge_prompts_path)
    baseline = _baseline(config)
    index = 0
    for model, answers in read_answers(config.answers_path, "answers_path").items():
        known = [question for question in asked if question.id in answers]
        if not known:
            raise DatasetError(f"dataset.answers_path={config.answers_path}: {model} answers none of the questions")
        if len(known) < len(asked):
            log.warning("%s answers %d of %d questions; the others are not judged", model, len(known), len(asked))
        for question in known:
            for row in _rows(question, model, answers[question.id], baseline, prompts, config):
                yield replace(row, index=index)
                index += 1


KINDS = {"mtbench_judge": Kind(rows=read_judged, keys=KEYS, needs=NEEDS)}


@dataclass(frozen=True, kw_only=True)
class _Question:
    record: Record
    id: str
    turns: Sequence[str]
    references: Sequence[str]

    @property
    def fields(self) -> Fields:
        return self.record.fields or {}


def _asked(config: DatasetFields) -> list[_Question]:
    given: ByQuestion = {}
    if config.references_path is not None:
        given = read_answer_file(config.references_path, "references_path")
    found: list[_Question] = []
    for record, id, turns in questions(config.path or "", config.max_row_bytes):
        fields = record.fields or {}
        wants = fields.get("category") in WITH_REFERENCES
        known = [text or "" for text in given.get(id, [])] or references_of(fields)
        found.append(_Question(record=record, id=id, turns=turns, references=known if wants else ()))
    without = sum(each.fields.get("category") in WITH_REFERENCES and not each.references for each in found)
    if without:
        log.warning(
            "%d questions of %s have no reference answer, and are judged without: dataset.references_path names a file",
            without,
            ", ".join(sorted(WITH_REFERENCES)),
        )
    return found


def _baseline(config: DatasetFields) -> tuple[str, ByQuestion] | None:
    if config.baseline_path is None:
        return None
    models = read_answers(config.baseline_path, "baseline_path")
    if len(models) > 1:
        raise DatasetError(f"dataset.baseline_path={config.baseline_path} has {len(models)} models: name one's file")
    return next(iter(models.items()))


def _rows(
    question: _Question,
    model: str,
    answers: Sequence[str | None],
    baseline: tuple[str, ByQuestion] | None,
    prompts: JudgePrompts,
    config: DatasetFields,
) -> Iterator[Row]:
    for turn in range(1, 1 + min(len(question.turns), len(answers), MAX_TURNS)):
        columns: Fields = {
            "question_id": question.fields.get("question_id"),
            "category": question.fields.get("category"),
            "model": model,
            "baseline": None if baseline is None else baseline[0],
            "turn": turn,
        }
        if baseline is None:
            shown = {"answer": answers}
            yield _row(question, f"{model}/{question.id}/{turn}", shown, prompts, {**columns, "game": None}, config)
            continue
        other = baseline[1].get(question.id, ())
        for game, (first, second) in enumerate(((answers, other), (other, answers)), start=1):
            shown, id = {"answer_a": first, "answer_b": second}, f"{model}/{question.id}/{turn}/{game}"
            yield _row(question, id, shown, prompts, {**columns, "game": game}, config)


def _row(
    question: _Question,
    id: str,
    shown: Mapping[str, Sequence[str | None]],
    prompts: JudgePrompts,
    columns: Fields,
    config: DatasetFields,
) -> Row:
    turn = 1 if columns["turn"] == 1 else MAX_TURNS
    kind = "single" if len(shown) == 1 else "pairwise"
    prompt = prompts.choose(kind, bool(question.references), turn)
    columns = {**columns, "prompt_name": prompt.name, "user_prompt": None}
    try:
        values = _values(question, shown, turn)
        text = check_text(prompt.fill(values), "the judge's prompt")
    except BadRecord as error:
        return Row(
            index=0,
            id=id,
            prompt="",
            messages=None,
            columns=columns if config.keep_columns else {},
            error=f"{question.record.place}: {error}",
        )
    content = Content(prompt=f"{prompt.system}\n\n{text}" if prompt.system else text)
    if config.chat_template:
        told: list[Message] = [{"role": "system", "content": prompt.system}] if prompt.system else []
        content = Content(messages=[*told, {"role": "user", "content": text}])
    kept = {**columns, "user_prompt": text} if config.keep_columns else {}
    return make_row(0, id, content, kept, config)


def _values(question: _Question, shown: Mapping[str, Sequence[str | None]], turn: int) -> dict[str, str]:
    """What the places of a prompt are filled with. Raises BadRecord where an answer is missing."""
    values = {f"ref_answer_{number}": text for number, text in enumerate(question.references, start=1)}
    if question.references:
        values.setdefault("ref_answer_2", "")
    values |= {"question": question.turns[0]} if turn == 1 else {}
    values |= {f"question_{number}": text for number, text in enumerate(question.turns, start=1) if turn > 1}
    for name, answers in shown.items():
        for number in range(1, turn + 1):
            answer = answers[number - 1] if number <= len(answers) else None
            if answer is None:
                raise BadRecord(f"turn {number} of question {question.id} has no answer to judge")
            values[name if turn == 1 else f"{name}_{number}"] = answer
    return values
