"""How runs of ranks end: with tokens, with a stop of one rank, or with a fault of its disk."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

from runtime import Runtime, RuntimeConfig
from runtime.engine.records import PassRecord
from runtime.errors import Interrupted, StorageError
from runtime.ranks.ranks import Ranks
from runtime.sequences.sequence import Completion, Request, SequenceState
from runtime.store.reader import Reader


def completed(runtime: Runtime, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    results = runtime.generate([list(prompt) for prompt in prompts])
    assert all(isinstance(result, Completion) for result in results), results
    return [list(result.token_ids) for result in results if isinstance(result, Completion)]


def stopped_once(ranks: Ranks, config: RuntimeConfig, prompts: Sequence[Sequence[int]], *, num_looks: int = 12) -> str:
    """How a run ends that rank 1 alone is asked to stop, behind so many looks of its own."""
    asked = iter(range(num_looks))
    runtime = Runtime(config, ranks=ranks, should_stop=lambda: bool(ranks.rank == 1 and next(asked, None) is None))
    try:
        completed(runtime, prompts)
    except Interrupted as error:
        return str(error)
    return "to its end"


def faulted_once(ranks: Ranks, config: RuntimeConfig, prompts: Sequence[Sequence[int]]) -> str:
    """How a run ends in which rank 0 cannot read any more behind its third pass. What rows had come to it still says,
    where others are asked who wait for it."""
    runtime, records, known, read = (
        Runtime(config, ranks=ranks),
        list[PassRecord](),
        dict[int, SequenceState](),
        Reader._read,
    )
    requests = [runtime.request(str(i), prompt) for i, prompt in enumerate(prompts)]
    valid = [each for each in requests if isinstance(each, Request)]

    def failing(reader: Reader, *arguments: Any) -> Any:
        if len(records) > 2:
            raise StorageError("the disk is gone")
        return read(reader, *arguments)

    def noted(record: PassRecord) -> None:
        records.append(record)
        known.update(session.snapshot())

    try:
        if ranks.rank:
            list(runtime.follow(valid))
        with mock.patch.object(Reader, "_read", failing), runtime.open_with_backoff(valid) as (_, session):
            try:
                list(session.generate(valid, noted))
            finally:
                known.update(session.snapshot())
    except (Interrupted, StorageError) as error:
        return f"{error}" if ranks.rank else f"{error}, {len(known)} rows are known"
    return "to its end"
