"""What reading and writing at a position have in common: the whole of it or an error, in threads, timed."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ..plan.extents import ALIGNMENT_BYTES
from ..units import round_down


@dataclass(frozen=True, kw_only=True)
class ChunkTiming:
    """Of one chunk, or of all of a transfer: monotonic seconds, without the time spent in the queue."""

    begin: float
    end: float
    num_bytes: int


class PendingTransfer:
    """Chunks in flight between a file and memory. `wait` returns when all have arrived and raises what a thread
    raised."""

    def __init__(self, chunks: Sequence[Future[ChunkTiming]]):
        self._chunks = chunks

    @property
    def is_done(self) -> bool:
        return all(chunk.done() for chunk in self._chunks)

    def wait(self) -> None:
        errors = [chunk.exception() for chunk in self._chunks]
        for error in errors:
            if error is not None:
                raise error

    @property
    def timing(self) -> ChunkTiming:
        """From the first chunk's begin to the last one's end. Of a transfer that is done."""
        timings = [chunk.result() for chunk in self._chunks]
        return ChunkTiming(
            begin=min((t.begin for t in timings), default=0.0),
            end=max((t.end for t in timings), default=0.0),
            num_bytes=sum(t.num_bytes for t in timings),
        )


def transfer(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    views: Sequence[memoryview],
    offset: int,
    num_bytes: int,
    *,
    is_direct: bool,
) -> int:
    """Calls `os.preadv` or `os.pwritev` until `num_bytes` of the views have gone, or no more go. Returns how many did.
    Raises OSError."""
    done = 0
    while done < num_bytes:
        count = call(descriptor, _behind(views, done), offset + done)
        if is_direct and done + count < num_bytes:
            # A short direct transfer may end between blocks: go on from the last whole one.
            count = round_down(count, ALIGNMENT_BYTES)
        if count == 0:
            break
        done += count
    return done


def _behind(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []
