"""Tensors that ranks send one another: pieces of weights, where they see no memory in common or are asked to do
without; parts of a token's numbers, made whole within a pass; and hidden states from each rank in a line to the next.
"""

import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Self

import torch
import torch.distributed as dist

from ..closing import Closing
from ..errors import Interrupted
from ..plan.shape.extents import Extent, even_shares_of
from ..store.reader import Reader
from ..store.transfer import ChunkTiming, PendingTransfer
from ..stream.device import ComputeDevice
from ..stream.filling import LocalReader, SessionResources, Transfer, WeightReader
from .ranks import STOPPED, Ranks

POLL_SECONDS, NUM_POLLS = 1e-4, 20  # between two looks whether a piece is there; looks between two at the others
LOOK_SECONDS = 0.02  # between two looks for a stop, or for one that has ended


class Collectives(Closing, SessionResources):
    """The gathering of pieces of weights in one session, of one thread at a time but for `abandon`. It has a process
    group of its own, so that its order is none of the messages'. All ranks come to each piece in one order, that of
    the schedule."""

    def __init__(self, ranks: Ranks):
        """Made by all ranks at once. Raises PeerEnded."""
        self.ranks = ranks
        ranks.exchange({})  # all are there: nothing ends the wait for one that has ended
        self._group = ranks.new_group()
        self._is_abandoned = Event()
        self._why = Interrupted(STOPPED)  # nothing can be gathered any more

    def close(self) -> None:
        """Ends the connections. Where one is awaited that was abandoned, the others see that nothing comes any more."""
        if self._is_abandoned.is_set():
            self._group.abort()
        else:
            dist.destroy_process_group(self._group)

    def weight_reader(self, device: ComputeDevice, reader: Reader, *, count: int) -> "GatheredReader":
        return GatheredReader(self, device, reader)

    def abandon(self) -> None:
        """Nobody waits any more for what has begun, and nothing else can be gathered: ranks that go on would take one
        piece for another."""
        self._is_abandoned.set()

    def gather(self, pieces: torch.Tensor) -> None:
        """Fills `pieces`, uint8, with those of all ranks, of one size and in their order; this one's is in its place.
        Raises PeerEnded or Interrupted where another never comes to it."""
        own = pieces.chunk(self.ranks.size)[self.ranks.rank]
        if self._is_abandoned.is_set():
            raise self._why
        try:
            work = dist.all_gather_single(pieces, own, group=self._group, async_op=True)
            assert work is not None, "this rank is of the group"
            num_looks = 0
            while not work.is_completed():
                if self._is_abandoned.is_set():
                    raise Interrupted(STOPPED)
                num_looks += 1
                if num_looks % NUM_POLLS == 0:
                    self.ranks.require_running()
                time.sleep(POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            self._why = Interrupted(STOPPED) if self.ranks.is_stopping else self.ranks.explain_failure(error)
            self.abandon()
            raise self._why from error
        except Interrupted as error:
            self._why = error
            self.abandon()
            raise


class GatheredReader(WeightReader):
    """Reads of all ranks, wherever they are, each its share of every page, into memory of this process.

    Shares are of one size, in whole blocks; the few blocks that do not divide by the ranks each of them reads itself. A
    slot is this process' own, so it may be filled again once compute here has left it. A thread of its own comes to
    the collectives, in the order in which pages are asked for, which is the schedule's and so the same everywhere.
    """

    def __init__(self, collectives: Collectives, device: ComputeDevice, reader: Reader):
        self._collectives, self._device, self._reader = collectives, device, reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shares-gathered")

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def abandon(self) -> None:
        self._collectives.abandon()

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return self._device.host_buffer(num_bytes)

    def fill(self, number: int, extents: Sequence[Extent], buffer: torch.Tensor) -> "GatheredTransfer":
        ranks = self._collectives.ranks
        own, begin, end = even_shares_of(extents, ranks.rank, ranks.size)
        reading = self._reader.submit(own, buffer.numpy().data)
        return GatheredTransfer(self._collectives, self._thread.submit(self._gather, reading, buffer[begin:end]))

    def gather_timing(self, read: Transfer) -> ChunkTiming | None:
        return read.gather_timing if isinstance(read, GatheredTransfer) else None

    def _gather(self, reading: PendingTransfer, pieces: torch.Tensor) -> tuple[ChunkTiming, ChunkTiming]:
        try:
            reading.wait()
        except BaseException:
            self._collectives.abandon()  # the next page is not this one
            raise
        begin = time.monotonic()
        if len(pieces):
            self._collectives.gather(pieces)
        return reading.timing, ChunkTiming(begin, time.monotonic(), pieces.nbytes)


class GatheredTransfer:
    """A page on its way, of which each rank reads a share; `timing` is of this one's."""

    def __init__(self, collectives: Collectives, timings: Future[tuple[ChunkTiming, ChunkTiming]]):
        self._ranks, self._timings = collectives.ranks, timings

    @property
    def is_done(self) -> bool:
        return self._timings.done()

    def wait(self) -> None:
        """Returns when all shares are there; raises what this rank's read raised, PeerEnded, and Interrupted."""
        while not wait_for([self._timings], LOOK_SECONDS).done:
            self._ranks.require_running()
        self._timings.result()

    @property
    def timing(self) -> ChunkTiming:
        return self._timings.result()[0]

    @property
    def gather_timing(self) -> ChunkTiming:
        """When the page was gathered, once it was waited for."""
        return self._timings.result()[1]


class AllGather(SessionResources):
    """All ranks make the same calls in the same order, of equal shapes. Outside of its `with` block each is alone, and
    takes its own part for that of all others: shapes are right then, and numbers are not. What an accelerator has
    goes by way of host memory. `received_bytes`: from all others, so far. Raises PeerEnded where one has ended."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.received_bytes = ranks, 0
        self.index, self.count = ranks.rank, ranks.size
        self._is_active = False

    def __deepcopy__(self, memo: object) -> "AllGather":
        """Copies of a model ask the same ranks."""
        return self

    def __enter__(self) -> Self:
        """The others make the same calls from now on."""
        self._is_active = True
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_active = False

    def weight_reader(self, device: ComputeDevice, reader: Reader, *, count: int) -> LocalReader:
        """This rank alone reads its part of the model."""
        return LocalReader(device, reader)

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The parts of all ranks behind one another along `dim`."""
        if not self._is_active or part.is_meta:
            return torch.cat([part] * self.count, dim)
        device, part = part.device, part.contiguous().cpu()
        found = torch.empty(self.count, *part.shape, dtype=part.dtype)
        raw, raws = part.view(-1).view(torch.uint8), found.view(self.count, -1).view(torch.uint8)
        self.ranks.run(lambda: dist.all_gather([*raws.unbind()], raw, group=self.ranks.group, async_op=True))
        self.received_bytes += (self.count - 1) * part.nbytes
        at = dim % part.ndim
        return found.movedim(0, at).flatten(at, at + 1).to(device)

    def all_to_all(self, rows: torch.Tensor, given: Sequence[int], taken: Sequence[int]) -> torch.Tensor:
        """Hands the first `given[0]` rows (n, D) to rank 0, the next ones to rank 1 and so on, and gives what each rank
        hands to this one, of which all know how many rows these are: `taken[0]` of rank 0 first."""
        if not self._is_active or rows.is_meta:
            return rows.new_zeros(sum(taken), rows.shape[1])
        device, rows = rows.device, rows.contiguous().cpu()
        found = torch.empty(sum(taken), rows.shape[1], dtype=rows.dtype)
        raw, raws = rows.view(torch.uint8), found.view(torch.uint8)
        group = self.ranks.group
        self.ranks.run(lambda: dist.all_to_all_single(raws, raw, [*taken], [*given], group=group, async_op=True))
        self.received_bytes += (sum(taken) - taken[self.index]) * rows.shape[1] * rows.itemsize
        return found.to(device)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, of which each number is zero in all but one: in any order it is that number."""
        if not self._is_active or part.is_meta:
            return part
        device, part = part.device, part.contiguous().cpu()
        self.ranks.run(lambda: dist.all_reduce(part, group=self.ranks.group, async_op=True))
        self.received_bytes += 2 * (self.count - 1) * part.nbytes // self.count
        return part.to(device)


class PipelineLink:
    """Tensors of one pass at a time: `begin`, `receive` and `send` of each item, and `tell` of the last rank beside
    `heard` of the others. Transfers go on beside whatever else is done. Raises PeerEnded where another rank has ended.
    Not thread-safe."""

    def __init__(self, ranks: Ranks):
        """All ranks make theirs at the same time."""
        self.ranks = ranks
        self._group = ranks.new_group()
        self._waiter = TransferWaiter()
        self._receiving: list[dist.Work] = []
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []
        self._num_items = 0

    @property
    def is_last(self) -> bool:
        return self.ranks.rank == self.ranks.size - 1

    def begin(self, targets: Sequence[torch.Tensor | None]) -> None:
        """A pass of as many items. Each of `targets` is filled by the rank before, unless there is none."""
        self._num_items, before = len(targets), self.ranks.rank - 1
        self._receiving = [self._expect(before, item, each) for item, each in enumerate(targets) if each is not None]

    def receive(self, item: int) -> None:
        """Returns when the item's target is filled."""
        self._wait(self._receiving[item])

    def send(self, item: int, tensor: torch.Tensor) -> None:
        """Begins to send; the tensor must stay as it is until the pass is over."""
        self._send(self.ranks.rank + 1, item, tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Tells all others, who call `heard`, and ends the pass; of the last rank alone."""
        for other in range(self.ranks.size - 1):
            self._send(other, self._num_items, tensor)
        self._finish()

    def receive_broadcast(self, target: torch.Tensor) -> None:
        """Fills it with what the last rank tells, and ends the pass."""
        self._wait(self._expect(self.ranks.size - 1, self._num_items, target))
        self._finish()

    def _finish(self) -> None:
        """Waits until others have what was sent to them."""
        for work, _ in self._sending:
            self._wait(work)
        self._sending, self._receiving = [], []

    def _expect(self, source: int, item: int, target: torch.Tensor) -> dist.Work:
        try:
            work = dist.irecv(target, group_src=source, group=self._group, tag=item)
        except RuntimeError as error:
            raise self.ranks.explain_failure(error) from error
        assert work is not None, "every rank is of the group"
        return work

    def _send(self, target: int, item: int, tensor: torch.Tensor) -> None:
        try:
            work = dist.isend(tensor, group_dst=target, group=self._group, tag=item)
        except RuntimeError as error:
            raise self.ranks.explain_failure(error) from error
        assert work is not None, "every rank is of the group"
        self._sending.append((work, tensor))

    def _wait(self, work: dist.Work) -> None:
        self._waiter.begin(work)
        try:
            self.ranks.wait(self._waiter.is_done)
        except RuntimeError as error:
            raise self.ranks.explain_failure(error) from error


class TransferWaiter:
    """Waits for one transfer at a time on a thread of its own, which ends with the process at the latest. Gloo's own
    wait for a transfer has no end while its connection holds, and one of limited time breaks that."""

    def __init__(self) -> None:
        self._pending = SimpleQueue[dist.Work | None]()
        self._results = SimpleQueue[RuntimeError | None]()
        Thread(target=_serve, args=(self._pending, self._results), name="ranks-line", daemon=True).start()
        weakref.finalize(self, self._pending.put, None)

    def begin(self, work: dist.Work) -> None:
        self._pending.put(work)

    def is_done(self, seconds: timedelta) -> bool:
        """Whether the transfer has ended in that time. Raises RuntimeError where it has failed."""
        try:
            error = self._results.get(timeout=seconds.total_seconds())
        except Empty:
            return False
        if error is not None:
            raise error
        return True


def _serve(pending: "SimpleQueue[dist.Work | None]", results: "SimpleQueue[RuntimeError | None]") -> None:
    while (work := pending.get()) is not None:
        failed = None
        try:
            work.wait()
        except RuntimeError as error:
            failed = error.with_traceback(None)
        del work  # let go of at the end of the process, which wakes this thread, it would abort it
        results.put(failed)
