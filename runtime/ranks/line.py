"""Ranks in a line: each is handed tensors by the one before it and hands others to the one behind, and the last tells
all what they have come to.
"""

import weakref
from collections.abc import Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist

from .ranks import Ranks


class Line:
    """Tensors of one pass at a time: `begin`, `receive` and `send` of each item, and `tell` of the last rank beside
    `heard` of the others. Transfers go on beside whatever else is done. Raises PeerEnded where another rank has ended.
    Not thread-safe."""

    def __init__(self, ranks: Ranks):
        """All ranks make theirs at the same time."""
        self.ranks = ranks
        self._group = ranks.new_group()
        self._waiter = Waiter()
        self._coming: list[dist.Work] = []
        self._going: list[tuple[dist.Work, torch.Tensor]] = []
        self._num_items = 0

    @property
    def is_last(self) -> bool:
        return self.ranks.rank == self.ranks.size - 1

    def begin(self, targets: Sequence[torch.Tensor | None]) -> None:
        """A pass of as many items. Each of `targets` is filled by the rank before, unless there is none."""
        self._num_items, before = len(targets), self.ranks.rank - 1
        self._coming = [self._expect(before, item, each) for item, each in enumerate(targets) if each is not None]

    def receive(self, item: int) -> None:
        """Returns when the item's target is filled."""
        self._wait(self._coming[item])

    def send(self, item: int, tensor: torch.Tensor) -> None:
        """Begins to send; the tensor must stay as it is until the pass is over."""
        self._send(self.ranks.rank + 1, item, tensor)

    def tell(self, tensor: torch.Tensor) -> None:
        """Tells all others, who call `heard`, and ends the pass; of the last rank alone."""
        for other in range(self.ranks.size - 1):
            self._send(other, self._num_items, tensor)
        self._finish()

    def heard(self, target: torch.Tensor) -> None:
        """Fills it with what the last rank tells, and ends the pass."""
        self._wait(self._expect(self.ranks.size - 1, self._num_items, target))
        self._finish()

    def _finish(self) -> None:
        """Waits until others have what was sent to them."""
        for work, _ in self._going:
            self._wait(work)
        self._going, self._coming = [], []

    def _expect(self, source: int, item: int, target: torch.Tensor) -> dist.Work:
        try:
            work = dist.irecv(target, group_src=source, group=self._group, tag=item)
        except RuntimeError as error:
            raise self.ranks.ending(error) from error
        assert work is not None, "every rank is of the group"
        return work

    def _send(self, target: int, item: int, tensor: torch.Tensor) -> None:
        try:
            work = dist.isend(tensor, group_dst=target, group=self._group, tag=item)
        except RuntimeError as error:
            raise self.ranks.ending(error) from error
        assert work is not None, "every rank is of the group"
        self._going.append((work, tensor))

    def _wait(self, work: dist.Work) -> None:
        self._waiter.begin(work)
        try:
            self.ranks.wait(self._waiter.is_done)
        except RuntimeError as error:
            raise self.ranks.ending(error) from error


class Waiter:
    """Waits for one transfer at a time on a thread of its own, which ends with the process at the latest. Gloo's own
    wait for a transfer has no end while its connection holds, and one of limited time breaks that."""

    def __init__(self) -> None:
        self._asked = SimpleQueue[dist.Work | None]()
        self._ended = SimpleQueue[RuntimeError | None]()
        Thread(target=_serve, args=(self._asked, self._ended), name="ranks-line", daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

    def begin(self, work: dist.Work) -> None:
        self._asked.put(work)

    def is_done(self, seconds: timedelta) -> bool:
        """Whether the transfer has ended in that time. Raises RuntimeError where it has failed."""
        try:
            error = self._ended.get(timeout=seconds.total_seconds())
        except Empty:
            return False
        if error is not None:
            raise error
        return True


def _serve(asked: "SimpleQueue[dist.Work | None]", ended: "SimpleQueue[RuntimeError | None]") -> None:
    while (work := asked.get()) is not None:
        failed = None
        try:
            work.wait()
        except RuntimeError as error:
            failed = error.with_traceback(None)
        del work  # let go of at the end of the process, which wakes this thread, it would abort it
        ended.put(failed)
