"""Admission in waves: a block runs to its end, and is committed, before the next one begins."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.batching.balance import Block
from runtime.engine.records import PassRecord
from runtime.engine.sequence import Completion, Request, Unfinished

from .open_run import OpenRun, Surroundings
from .progress import Progress


class WaveSession(Protocol):
    """What is asked of `runtime.session.Session`."""

    def wave(
        self,
        block: Block,
        left: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, Unfinished],
        on_pass: Callable[[PassRecord], None],
    ) -> Iterator[tuple[int, Completion]]: ...

    def snapshot(self) -> dict[int, Unfinished]: ...


@dataclass(frozen=True)
class _OneBlock:
    """A session that streams one block."""

    session: WaveSession
    block: Block

    def stream(
        self,
        order: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, Unfinished],
        on_pass: Callable[[PassRecord], None],
    ) -> Iterator[tuple[int, Completion]]:
        return self.session.wave(self.block, order, requests, unfinished, on_pass)

    def snapshot(self) -> dict[int, Unfinished]:
        return self.session.snapshot()


def generate_waves(session: WaveSession, blocks: Sequence[Block], around: Surroundings) -> None:
    """Generates and commits `blocks`. Raises Interrupted or OutputError: what was sampled of the block that ran is then
    saved, or, with `checkpoint_seconds` None, lost."""
    num_tokens = sum(_most_tokens(block, around) for block in blocks)
    with Progress(num_tokens, len(blocks)) as progress:
        for block in blocks:
            run = OpenRun(_OneBlock(session, block), [block], around, block=block.index)
            progress.know(_most_tokens(block, around) - run.num_tokens)
            run.finish(progress)


def _most_tokens(block: Block, around: Surroundings) -> int:
    return sum(around.asked.requests[i].max_new_tokens for i in block.members)
