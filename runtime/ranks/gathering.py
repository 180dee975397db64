"""What ranks that compute each token together hand one another within a pass: parts of its numbers, made whole."""

from collections.abc import Sequence
from typing import Self

import torch
import torch.distributed as dist

from .ranks import Ranks


class Gathering:
    """All ranks make the same calls in the same order, of equal shapes. Outside of its `with` block each is alone, and
    takes its own part for that of all others: shapes are right then, and numbers are not. What an accelerator has
    goes by way of host memory. `received_bytes`: from all others, so far. Raises PeerEnded where one has ended."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.received_bytes = ranks, 0
        self.index, self.count = ranks.rank, ranks.size
        self._is_going = False

    def __deepcopy__(self, memo: object) -> "Gathering":
        """Copies of a model ask the same ranks."""
        return self

    def __enter__(self) -> Self:
        """The others make the same calls from now on."""
        self._is_going = True
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_going = False

    def whole(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The parts of all ranks behind one another along `dim`."""
        if not self._is_going or part.is_meta:
            return torch.cat([part] * self.count, dim)
        device, part = part.device, part.contiguous().cpu()
        found = torch.empty(self.count, *part.shape, dtype=part.dtype)
        raw, raws = part.view(-1).view(torch.uint8), found.view(self.count, -1).view(torch.uint8)
        self.ranks.run(lambda: dist.all_gather([*raws.unbind()], raw, group=self.ranks.group, async_op=True))
        self.received_bytes += (self.count - 1) * part.nbytes
        at = dim % part.ndim
        return found.movedim(0, at).flatten(at, at + 1).to(device)

    def exchanged(self, rows: torch.Tensor, given: Sequence[int], taken: Sequence[int]) -> torch.Tensor:
        """Hands the first `given[0]` rows (n, D) to rank 0, the next ones to rank 1 and so on, and gives what each rank
        hands to this one, of which all know how many rows these are: `taken[0]` of rank 0 first."""
        if not self._is_going or rows.is_meta:
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
        if not self._is_going or part.is_meta:
            return part
        device, part = part.device, part.contiguous().cpu()
        self.ranks.run(lambda: dist.all_reduce(part, group=self.ranks.group, async_op=True))
        self.received_bytes += 2 * (self.count - 1) * part.nbytes // self.count
        return part.to(device)
