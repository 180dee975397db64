"""Exports runs in the format of FastChat's `llm_judge`: answers to questions of one or several turns, or judgments from
a run of dataset=mtbench_judge. Output is deterministic: ids are digests, and the timestamp is the run's."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path, PurePath

import pyarrow as pa
import pyarrow.parquet as pq

from runtime.errors import ConfigError

from ..record.run_reader import RunReader
from .columns import JsonObject, ResultWriter, RowValues
from .config import ErrorRows

JUDGE_KIND = "mtbench_judge"  # data set kind of judgments
JUDGE_COLUMNS = ("question_id", "model", "baseline", "prompt_name", "user_prompt", "turn", "game")
ERROR = "$ERROR$"  # FastChat's text for a missing answer
NO_RATING = -1
RATING, LOOSE_RATING = re.compile(r"\[\[(\d+\.?\d*)\]\]"), re.compile(r"\[(\d+\.?\d*)\]")
ID_DIGITS = 22


def parse_rating(judgment: str) -> int | float | None:
    """The rating in the first `[[7]]`, otherwise in the first `[7]`; None without either."""
    match = RATING.search(judgment) or LOOSE_RATING.search(judgment)
    if match is None:
        return None
    return float(match[1]) if "." in match[1] else int(match[1])


def parse_winner(judgment: str) -> str:
    """`A`, `B` or `tie` for the verdict `[[A]]`, `[[B]]` or `[[C]]`, checked in this order; else `error`."""
    verdicts = {"[[A]]": "A", "[[B]]": "B", "[[C]]": "tie"}
    return next((winner for mark, winner in verdicts.items() if mark in judgment), "error")


def parse_game_winner(game: int, judgment: str) -> str:
    """`model_1`, `model_2`, `tie` or `error`. The baseline is `model_2`; its answer comes first in game 2."""
    winner = parse_winner(judgment)
    models = ("model_1", "model_2") if game == 1 else ("model_2", "model_1")
    return dict(zip("AB", models, strict=True)).get(winner, winner)


def judge_name(run: RunReader) -> str:
    """Display name of the judge: the model's name, or the last component of its path."""
    path, name = ({**run.semantic, **run.operational}.get(f"model.{key}") for key in ("path", "name"))
    return PurePath(path).name if isinstance(path, str) else str(name)


def require_judge_columns(schema: pa.Schema, run: RunReader) -> None:
    """Raises ConfigError if the run has no columns that identify the judged answers."""
    missing = [name for name in JUDGE_COLUMNS if name not in schema.names]
    if missing:
        raise ConfigError(
            f"{run.path} has no column {missing[0]}: ratings are read from runs of dataset={JUDGE_KIND} with "
            "dataset.keep_columns=true"
        )


def is_judge_run(run: RunReader) -> bool:
    return run.semantic.get("dataset.kind") == JUDGE_KIND


@dataclass(kw_only=True)
class AnswerWriter(ResultWriter):
    """Writes a line per question with the answers to all turns; replicas of a question become choices. Holds all
    answers in memory."""

    model_id: str
    time: float

    def format_results(self, rows: Iterator[RowValues]) -> Iterator[tuple[bool, JsonObject]]:
        by_question: dict[str, dict[int, dict[int, str]]] = {}  # then by choice and turn
        failed: set[str] = set()
        for row in rows:
            question, _, replica = str(row["id"]).partition("#")
            choice = int(replica or 0) if row["sample_index"] == 0 else int(row["sample_index"])
            is_ok = row["status"] == "ok"
            turns = by_question.setdefault(question, {}).setdefault(choice, {})
            turns[int(row.get("turn") or 1)] = row["completion"] if is_ok else ERROR
            failed |= set() if is_ok else {question}
        for question, choices in by_question.items():
            answers = [
                {"index": index, "turns": [turns[turn] for turn in sorted(turns)]}
                for index, turns in sorted(choices.items())
            ]
            yield (
                question in failed,
                {
                    "question_id": int(question) if question.isdecimal() else question,
                    "answer_id": sha256(json.dumps([question, self.model_id, answers]).encode()).hexdigest()[
                        :ID_DIGITS
                    ],
                    "model_id": self.model_id,
                    "choices": answers,
                    "tstamp": self.time,
                },
            )


@dataclass(kw_only=True)
class JudgmentWriter(ResultWriter):
    """Writes a line per judgment, or per two games of a pair."""

    judge: str
    time: float

    def format_results(self, rows: Iterator[RowValues]) -> Iterator[tuple[bool, JsonObject]]:
        for _, group in groupby(rows, key=lambda row: [row[key] for key in ("model", "question_id", "turn")]):
            games = list(group)
            line = self._single(games[0]) if games[0]["baseline"] is None else self._pair(games)
            yield any(row["status"] != "ok" for row in games), line

    def _single(self, row: RowValues) -> JsonObject:
        judgment = judgment_text(row)
        rating = parse_rating(judgment)
        return {
            "question_id": row["question_id"],
            "model": row["model"],
            "judge": [self.judge, row["prompt_name"]],
            "user_prompt": row["user_prompt"],
            "judgment": judgment,
            "score": NO_RATING if rating is None else rating,
            "turn": row["turn"],
            "tstamp": self.time,
        }

    def _pair(self, games: Sequence[RowValues]) -> JsonObject:
        first, answers = games[0], {row["game"]: row for row in games}
        line = {"question_id": first["question_id"], "model_1": first["model"], "model_2": first["baseline"]}
        line |= {f"g{game}_winner": parse_game_winner(game, judgment_text(row)) for game, row in answers.items()}
        line["judge"] = [self.judge, first["prompt_name"]]
        for game, row in answers.items():
            line |= {f"g{game}_user_prompt": row["user_prompt"], f"g{game}_judgment": judgment_text(row)}
        return {**line, "turn": first["turn"], "tstamp": self.time}


def judgment_text(row: RowValues) -> str:
    return row["completion"] if row["status"] == "ok" else ERROR


def make_fastchat_writer(
    shards: Sequence[RunReader], schema: pa.Schema, error_rows: ErrorRows, out: Path
) -> AnswerWriter | JudgmentWriter:
    """The writer for these shards. FastChat identifies the model of answers by the file name. Raises ConfigError."""
    times: list[float] = []  # start times of the run's processes, Unix seconds
    for path in (path for run in shards for path in sorted(run.directory.throughput.glob("part-*.parquet"))):
        times += pq.read_table(path, columns=["started_at"])["started_at"].to_pylist()
    time = min(times, default=0.0)
    if not is_judge_run(shards[0]):
        return AnswerWriter(model_id=out.name.removesuffix(".jsonl"), time=time, error_rows=error_rows)
    require_judge_columns(schema, shards[0])
    return JudgmentWriter(judge=judge_name(shards[0]), time=time, error_rows=error_rows)
