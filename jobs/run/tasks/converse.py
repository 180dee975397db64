"""Multi-turn chats: each turn is a run in a directory of its own, and its prompts contain the answers of earlier
turns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from runtime.checkpoint_source.location import find_tokenizer
from runtime.devices.messages import end_sessions
from runtime.errors import ConfigError
from runtime.ranks.ranks import Ranks
from runtime.sequences.detokenizer import Detokenizer

from ...config.settings import GenerateConfig, run_directory
from ...datasets import Row
from ...record.passes import Start
from ...record.run_dir import RunDirectory
from ...record.run_reader import find_runs
from ...record.summary import Outcome
from ...tracking.feed import RunFeed
from ..ranks import follow_run
from ..run import require_usable_row, run_task
from .generate import generation_task
from .task import Task, dataset_rows

ANSWERS = "answers"  # key of a message between ranks
TURN = "turn"  # output column; an input column of that name becomes `row_turn`


def run_turns(
    config: GenerateConfig,
    should_stop: Callable[[], bool],
    start: Start | None = None,
    ranks: Ranks | None = None,
    feed: RunFeed | None = None,
) -> Iterator[Outcome]:
    """Runs or resumes the turns in order and yields their outcomes. Elastic workers start a turn once the previous one
    is complete. `ranks`: set on rank 0 of several. `feed`: gets the curves of all turns. Raises the errors of
    runtime.errors."""
    directory = run_directory(config)
    if RunDirectory(path=directory).manifest.exists():
        raise ConfigError(f"{directory} contains a run with a single turn: choose another directory with run=")
    rows = dataset_rows(config, None)
    require_usable_row(generation_task(config), config, rows)
    num_turns = _num_turns(rows)
    for turn in range(1, num_turns + 1):
        outcome = run_task(_turn_task(config, rows, turn, num_turns), config, should_stop, start, ranks, feed=feed)
        yield outcome
        if turn < num_turns:
            answers = _read_answers(outcome, config)
            if ranks is not None:
                end_sessions(ranks)
                ranks.broadcast({ANSWERS: answers})
            rows = _next_turn_rows(rows, turn, answers)


def follow_turns(config: GenerateConfig, should_stop: Callable[[], bool], ranks: Ranks) -> int:
    """`follow_run` for each turn; rank 0 broadcasts the answers of the previous turn."""
    rows = dataset_rows(config, None)
    require_usable_row(generation_task(config), config, rows)
    num_turns = _num_turns(rows)
    for turn in range(1, num_turns + 1):
        code = follow_run(_turn_task(config, rows, turn, num_turns), config, should_stop, ranks)
        if code:
            return code
        if turn < num_turns:
            rows = _next_turn_rows(rows, turn, ranks.receive()[ANSWERS])
    return 0


def _num_turns(rows: Sequence[Row]) -> int:
    return 1 + max(len(row.later_turns) for row in rows)


def _turn_task(config: GenerateConfig, rows: Sequence[Row], turn: int, num_turns: int) -> Task:
    columns_by_row = [
        {f"row_{TURN}" if name == TURN else name: value for name, value in row.columns.items()} for row in rows
    ]
    turn_rows = [
        replace(row, columns={**columns, TURN: turn}) for row, columns in zip(rows, columns_by_row, strict=True)
    ]
    return replace(
        generation_task(config),
        directory=run_directory(config) / f"turn-{turn}",
        rows=lambda *_: turn_rows,
        identity={"turn": turn, "num_turns": num_turns},
    )


def _read_answers(outcome: Outcome, config: GenerateConfig) -> Mapping[str, Mapping[str, str | None]]:
    """Answers by row id: the message's `content`, or an error. Verifies the parts. Raises DamagedRunError.

    SentencePiece decodes the first token of a completion with a leading space. Templates of such models (Mistral's)
    write that space themselves, so it is removed: the next prompt must have the tokens that the model generated.
    """
    (run,) = find_runs([str(outcome.directory)], "run")
    columns = ["id", "completion", "error", "token_ids"]
    rows = [row for block in sorted(run.parts) for row in run.read_part(block).select(columns).to_pylist()]
    spaced = [row for row in rows if (row["completion"] or "").startswith(" ")]
    tokenizer = find_tokenizer(config.model, config.offload.cache_dir) if spaced else None
    if tokenizer is not None:
        texts = Detokenizer(tokenizer)
        for row in spaced:
            if not texts.decode(row["token_ids"]).startswith(" "):
                row["completion"] = row["completion"][1:]
    return {row["id"]: {"content": row["completion"], "error": row["error"]} for row in rows}


def _next_turn_rows(rows: Sequence[Row], turn: int, answers: Mapping[str, Mapping[str, str | None]]) -> list[Row]:
    """The rows that have another turn. Rows of other shards have no answer; this shard does not generate them."""
    continued: list[Row] = []
    for row in rows:
        if not row.later_turns:
            continue
        prompt, *later = row.later_turns
        answer = answers.get(row.id, {})
        error = answer.get("error")
        if row.error is not None or error is not None:
            error = row.error or f"turn {turn} has no answer: {error}"
            continued.append(replace(row, messages=None, later_turns=tuple(later), error=error))
            continue
        messages = [*(row.messages or []), {"role": "assistant", "content": answer.get("content")}]
        messages.append({"role": "user", "content": prompt})
        continued.append(replace(row, messages=messages, later_turns=tuple(later)))
    return continued
