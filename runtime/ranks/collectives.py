"""Transfers of tensors between ranks: weights that are read by shares without shared memory, partial activations within
a pass (tensor parallelism), and hidden states between pipeline stages.

Streamed weights are read in pages (parts of a layer), of which each rank reads a share. A slot is a buffer for a page.
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
from ..plan.shape.extents import Extent, even_reader_share
from ..store.reader import Reader
from ..store.transfer import ChunkTiming, PendingTransfer
from ..stream.device import ComputeDevice
from ..stream.weight_reader import LocalReader, SessionResources, Transfer, WeightReader
from .ranks import POLL_SECONDS, POLLS_PER_CHECK, STOPPED, Ranks

CHECK_SECONDS = 0.02  # between checks for a rank that stopped or ended


class WeightGather(Closing, SessionResources):
    """All-gather of weights of which each rank has read a share. Has its own process group, and is used in one session.
    All ranks must gather the same pages in the same order. Not thread-safe, except `abandon`."""

    def __init__(self, ranks: Ranks):
        """Must be called by all ranks together. Raises PeerEnded."""
        self.ranks = ranks
        ranks.exchange({})  # raises PeerEnded; `new_group` would wait forever for a rank that has ended
        self._group = ranks.new_group()
        self._is_abandoned = Event()
        self._failure = Interrupted(STOPPED)  # raised by gathers after `abandon`

    def close(self) -> None:
        """Closes the connections; after `abandon`, aborts them so that peers stop waiting."""
        if self._is_abandoned.is_set():
            self._group.abort()
        else:
            dist.destroy_process_group(self._group)

    def weight_reader(self, device: ComputeDevice, reader: Reader, *, count: int) -> "GatheredReader":
        return GatheredReader(self, device, reader)

    def abandon(self) -> None:
        """Makes pending and later gathers fail."""
        self._is_abandoned.set()  # permanent: after a skipped collective, ranks would gather different pages

    def gather(self, shares: torch.Tensor) -> None:
        """All-gathers bytes in place. `shares` (uint8) contains one share per rank, of equal size, ordered by rank;
        this rank's share must be filled. Raises PeerEnded, or Interrupted if a rank stops."""
        own = shares.chunk(self.ranks.size)[self.ranks.rank]
        if self._is_abandoned.is_set():
            raise self._failure
        try:
            work = dist.all_gather_single(shares, own, group=self._group, async_op=True)
            assert work is not None, "this rank is in the group"
            num_polls = 0
            while not work.is_completed():
                if self._is_abandoned.is_set():
                    raise Interrupted(STOPPED)
                num_polls += 1
                if num_polls % POLLS_PER_CHECK == 0:
                    self.ranks.require_running()
                time.sleep(POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            self._failure = Interrupted(STOPPED) if self.ranks.is_stopping else self.ranks.explain_failure(error)
            self.abandon()
            raise self._failure from error
        except Interrupted as error:
            self._failure = error
            self.abandon()
            raise


class GatheredReader(WeightReader):
    """Reads this rank's share of every page, and all-gathers the page into the memory of each rank.

    The shares of N ranks are equal numbers of whole file blocks; if some blocks remain, every rank reads them itself.
    Slots are private to the process. All ranks must call `fill` in the same order.
    """

    def __init__(self, weight_gather: WeightGather, device: ComputeDevice, reader: Reader):
        self._weight_gather, self._device, self._reader = weight_gather, device, reader
        # One thread: collectives must have the same order on all ranks.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-gather")

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def abandon(self) -> None:
        self._weight_gather.abandon()

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return self._device.host_buffer(num_bytes)

    def fill(self, number: int, extents: Sequence[Extent], buffer: torch.Tensor) -> "GatheredTransfer":
        ranks = self._weight_gather.ranks
        own, begin, end = even_reader_share(extents, ranks.rank, ranks.size)
        reading = self._reader.submit(own, buffer.numpy().data)
        return GatheredTransfer(self._weight_gather, self._thread.submit(self._gather, reading, buffer[begin:end]))

    def gather_timing(self, read: Transfer) -> ChunkTiming | None:
        return read.gather_timing if isinstance(read, GatheredTransfer) else None

    def _gather(self, reading: PendingTransfer, shares: torch.Tensor) -> tuple[ChunkTiming, ChunkTiming]:
        """Waits for the read, then gathers. Returns the timings of read and gather."""
        try:
            reading.wait()
        except BaseException:
            self._weight_gather.abandon()  # other ranks wait for this gather; a later one would be for another page
            raise
        begin = time.monotonic()
        if len(shares):
            self._weight_gather.gather(shares)
        return reading.timing, ChunkTiming(begin, time.monotonic(), shares.nbytes)


class GatheredTransfer:
    """The read and gather of a page, of which each rank reads a share. `timing` covers only this rank's read."""

    def __init__(self, weight_gather: WeightGather, timings: Future[tuple[ChunkTiming, ChunkTiming]]):
        self._ranks, self._timings = weight_gather.ranks, timings

    @property
    def is_done(self) -> bool:
        return self._timings.done()

    def wait(self) -> None:
        """Waits for all shares. Raises errors of this rank's read, PeerEnded, and Interrupted."""
        while not wait_for([self._timings], CHECK_SECONDS).done:
            self._ranks.require_running()
        self._timings.result()

    @property
    def timing(self) -> ChunkTiming:
        return self._timings.result()[0]

    @property
    def gather_timing(self) -> ChunkTiming:
        """Timing of the gather; valid after `wait`."""
        return self._timings.result()[1]


class AllGather(SessionResources):
    """Collectives for tensor parallelism, over host memory. All ranks must make the same calls in the same order, with
    equal shapes. Outside the `with` block of this object nothing is sent: results have the right shapes, but wrong
    values, which suffices to test a model. Raises PeerEnded."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.received_bytes = ranks, 0  # bytes from other ranks so far
        self.index, self.count = ranks.rank, ranks.size
        self._is_active = False

    def __deepcopy__(self, memo: object) -> "AllGather":
        """Returns itself: copies of a model share the group."""
        return self

    def __enter__(self) -> Self:
        """Starts communication."""
        self._is_active = True
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_active = False

    def weight_reader(self, device: ComputeDevice, reader: Reader, *, count: int) -> LocalReader:
        """A local reader: each rank reads its own part of the model."""
        return LocalReader(device, reader)

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenates the parts of all ranks along `dim`."""
        if not self._is_active or part.is_meta:
            return torch.cat([part] * self.count, dim)
        device, part = part.device, part.contiguous().cpu()
        gathered = torch.empty(self.count, *part.shape, dtype=part.dtype)
        # Gloo does not support all dtypes: send bytes.
        sent_bytes, received_bytes = part.view(-1).view(torch.uint8), gathered.view(self.count, -1).view(torch.uint8)
        outputs = [*received_bytes.unbind()]
        self.ranks.run(lambda: dist.all_gather(outputs, sent_bytes, group=self.ranks.group, async_op=True))
        self.received_bytes += (self.count - 1) * part.nbytes
        dim %= part.ndim
        return gathered.movedim(0, dim).flatten(dim, dim + 1).to(device)

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        """Sends consecutive rows of `rows` (n, D) to each rank, `send_counts[r]` rows to rank r. Returns the rows
        received, ordered by rank: `receive_counts[r]` rows of rank r."""
        if not self._is_active or rows.is_meta:
            return rows.new_zeros(sum(receive_counts), rows.shape[1])
        device, rows = rows.device, rows.contiguous().cpu()
        received = torch.empty(sum(receive_counts), rows.shape[1], dtype=rows.dtype)
        # Gloo does not support all dtypes: send bytes.
        sent_bytes, received_bytes = rows.view(torch.uint8), received.view(torch.uint8)
        counts, group = ([*receive_counts], [*send_counts]), self.ranks.group
        self.ranks.run(lambda: dist.all_to_all_single(received_bytes, sent_bytes, *counts, group=group, async_op=True))
        self.received_bytes += (sum(receive_counts) - receive_counts[self.index]) * rows.shape[1] * rows.itemsize
        return received.to(device)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """All-reduce sum. Each element must be nonzero on at most one rank, so that the sum is exact in any order."""
        if not self._is_active or part.is_meta:
            return part
        device, part = part.device, part.contiguous().cpu()
        self.ranks.run(lambda: dist.all_reduce(part, group=self.ranks.group, async_op=True))
        self.received_bytes += 2 * (self.count - 1) * part.nbytes // self.count
        return part.to(device)


class PipelineLink:
    """Transport for pipeline parallelism: receives hidden states from the previous rank, and sends them to the next.

    A pass consists of `begin`, then `receive` and `send` of each item (the hidden states of one micro-batch), then
    `broadcast` on the last rank and `receive_broadcast` on other ranks. Transfers run in the background. Raises
    PeerEnded. Not thread-safe."""

    def __init__(self, ranks: Ranks):
        """Must be called by all ranks together."""
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
        """Begins a pass with one item per target. A target is the buffer for what the previous rank sends; None on
        rank 0."""
        self._num_items, previous = len(targets), self.ranks.rank - 1
        self._receiving = [self._start_receive(previous, i, t) for i, t in enumerate(targets) if t is not None]

    def receive(self, item: int) -> None:
        """Waits until the item's target is filled."""
        self._wait(self._receiving[item])

    def send(self, item: int, tensor: torch.Tensor) -> None:
        """Starts sending to the next rank; the tensor must not change until the pass ends."""
        self._start_send(self.ranks.rank + 1, item, tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Sends a tensor from the last rank to all others, which call `receive_broadcast`. Ends the pass."""
        for other in range(self.ranks.size - 1):
            self._start_send(other, self._num_items, tensor)
        self._finish()

    def receive_broadcast(self, target: torch.Tensor) -> None:
        """Receives the last rank's tensor into `target`. Ends the pass."""
        self._wait(self._start_receive(self.ranks.size - 1, self._num_items, target))
        self._finish()

    def _finish(self) -> None:
        for work, _ in self._sending:
            self._wait(work)
        self._sending, self._receiving = [], []

    def _start_receive(self, source: int, item: int, target: torch.Tensor) -> dist.Work:
        try:
            work = dist.irecv(target, group_src=source, group=self._group, tag=item)
        except RuntimeError as error:
            raise self.ranks.explain_failure(error) from error
        assert work is not None, "every rank is in the group"
        return work

    def _start_send(self, target: int, item: int, tensor: torch.Tensor) -> None:
        try:
            work = dist.isend(tensor, group_dst=target, group=self._group, tag=item)
        except RuntimeError as error:
            raise self.ranks.explain_failure(error) from error
        assert work is not None, "every rank is in the group"
        self._sending.append((work, tensor))

    def _wait(self, work: dist.Work) -> None:
        self._waiter.begin(work)
        try:
            self.ranks.wait(self._waiter.is_done)
        except RuntimeError as error:
            raise self.ranks.explain_failure(error) from error


class TransferWaiter:
    """Waits for one transfer at a time on a daemon thread, because the main thread must notice that a rank ended.
    Gloo's own wait cannot be interrupted, and its timeout breaks the connection."""

    def __init__(self) -> None:
        self._pending = SimpleQueue[dist.Work | None]()
        self._results = SimpleQueue[RuntimeError | None]()
        Thread(target=_wait_for_each, args=(self._pending, self._results), name="pipeline-wait", daemon=True).start()
        weakref.finalize(self, self._pending.put, None)

    def begin(self, work: dist.Work) -> None:
        self._pending.put(work)

    def is_done(self, seconds: timedelta) -> bool:
        """Waits up to `seconds`. Returns True if the transfer is done; raises RuntimeError if it failed."""
        try:
            error = self._results.get(timeout=seconds.total_seconds())
        except Empty:
            return False
        if error is not None:
            raise error
        return True


def _wait_for_each(pending: "SimpleQueue[dist.Work | None]", results: "SimpleQueue[RuntimeError | None]") -> None:
    while (work := pending.get()) is not None:
        failure = None
        try:
            work.wait()
        except RuntimeError as error:
            failure = error.with_traceback(None)
        del work  # a reference held at interpreter exit would abort the process
        results.put(failure)
