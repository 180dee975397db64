"""The directories of one run, which are its shards and the turns of its chats, and what of it is missing."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from runtime.errors import ConfigError, DamagedRunError

from ..record.found import Condition, FoundRun
from ..record.lacking import listed, missing_rows, told_lacking

log = logging.getLogger(__name__)


def require_one_run(runs: Sequence[FoundRun]) -> list[FoundRun]:
    """`runs` by their turns and the index of their shards. Raises ConfigError where they are not turns and shards of
    one run, each once."""
    first = runs[0]
    for other in runs[1:]:
        keys = sorted(key for key in {*first.identity, *other.identity} if _differ(first, other, key))
        if keys:
            raise ConfigError(
                f"{other.place} is another run than {first.place}, by {', '.join(keys[:3])}: one is exported at a time"
            )
        counts = first.shard[1], other.shard[1]
        if counts[0] != counts[1]:
            raise ConfigError(f"{first.place} is one of {counts[0]} shards and {other.place} one of {counts[1]}")
    by_place = {(run.turn, run.shard[0]): run for run in runs}
    if len(by_place) < len(runs):
        twice = next(run for run in runs if by_place[run.turn, run.shard[0]] is not run)
        other = by_place[twice.turn, twice.shard[0]]
        raise ConfigError(
            f"{twice.place} and {other.place} are both shard {twice.shard[0]} of {twice.shard[1]}: name one of them"
        )
    return [by_place[place] for place in sorted(by_place)]


def _differ(one: FoundRun, other: FoundRun, key: str) -> bool:
    return one.identity.get(key) != other.identity.get(key)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """What a run lacks: `sentences`, each about one shard, and how many planned rows are known to be missing."""

    sentences: Sequence[str]
    num_rows: int


def missing(shards: Sequence[FoundRun]) -> Missing:
    """What is not there yet, by names, footers and plans."""
    sentences, num_rows = absent_shards(shards), 0
    for run in shards:
        rows = missing_rows(run)
        num_rows += len(rows)
        if run.condition is not Condition.done or len(rows):
            sentences.append(told_lacking(run, rows))
    return Missing(sentences=sentences, num_rows=num_rows)


def absent_shards(runs: Sequence[FoundRun]) -> list[str]:
    """A sentence about the shards of each turn that are not there."""
    turns = range(1, runs[0].num_turns + 1)
    return [
        text for turn in turns for text in _absent([run for run in runs if run.turn == turn], runs[0].shard[1], turn)
    ]


def _absent(shards: Sequence[FoundRun], count: int, turn: int) -> list[str]:
    """What is said of shards of this turn that are not there; of a whole turn in one sentence."""
    absent = sorted(set(range(count)) - {run.shard[0] for run in shards})
    if not absent:
        return []
    if not shards:
        return [f"turn {turn} is not there"]
    where = f" (turn {turn})" if shards[0].num_turns > 1 else ""
    return [f"shard {listed(absent)} of {count}{where} {'is' if len(absent) == 1 else 'are'} not there"]


def read_parts(run: FoundRun, *, partial: bool) -> Iterator[tuple[pa.Table, "np.ndarray"]]:
    """Each part of a shard, verified, and of each row its place in the whole input. Raises DamagedRunError; with
    `partial` a damaged part is passed over with a warning."""
    for block in sorted(run.parts):
        try:
            table = run.read_part(block)
            places = table["row_index"].to_numpy()
        except DamagedRunError as error:
            if not partial:
                raise
            log.warning("left out: %s", error)
            continue
        yield table, places
