"""Ranks in a line: each is handed tensors by the one before it and hands others to the one behind, and the last tells
all what they have come to.
"""

from collections.abc import Sequence

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
        try:
            work.wait()
        except RuntimeError as error:
            raise self.ranks.ending(error) from error
