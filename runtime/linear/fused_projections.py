"""Weights that meet the same inputs, as those of queries, keys and values do: their products are made at once.

Inputs are then laid out once, threads wait for each other once, and small weights share their threads with large ones.
Nothing says which weights these are: a module shows it when it first runs, by multiplying the same tensor again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..config.profiles import BackendTable
from .backends import fused_linear, linear
from .blocks import Block


class FusedProjections:
    """Projections of one module that are made at once. Not thread-safe: lanes share one thread.

    Results are those of `linear`, to the bit where the same backend takes one weight and several.
    """

    def __init__(self) -> None:
        self._is_learning = True
        self._groups: dict[str, list[str]] = {}  # by their first names, in the order of their products
        self._x: torch.Tensor | None = None
        self._run: list[str] = []  # what `_x` has met, while learning
        self._made: dict[str, torch.Tensor] = {}  # of `_x`, not asked for yet
        self._making = ""  # the first name of their group
        self._num_inside = 0
        self._blocks: dict[str, Sequence[Block]] = {}

    def multiply(
        self, x: torch.Tensor, x_MK: torch.Tensor, name: str, table: BackendTable | None = None
    ) -> torch.Tensor:
        """Returns x @ w.T (M, N) of the weight of that name; `x_MK` holds the rows of `x`, which says whether it is the
        same as before. `table`: see `linear`."""
        if x is self._x and name in self._made:
            return self._take(name)
        self._discard()
        if self._is_learning:
            if x is not self._x or name in self._run:
                self._close_group()
                self._x = x
            self._run.append(name)
        group = self._groups.get(name)
        if self._is_learning or group is None:
            return linear(x_MK, self._blocks[name], table)
        outs = fused_linear(x_MK, [self._blocks[other] for other in group], table)
        self._x, self._making, self._made = x, name, dict(zip(group, outs, strict=True))
        return self._take(name)

    @contextmanager
    def scope(self, blocks: Mapping[str, Sequence[Block]]) -> Iterator[None]:
        """While a lane is in the module: by name, of weights that are multiplied as they are. When the first lane has
        left it is known who they are. Lanes that are inside at the same time bring the same weights."""
        self._blocks |= blocks
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            self._discard()
            if self._run:
                self._close_group()
                self._is_learning = False
            if not self._num_inside:
                self._blocks.clear()

    def _take(self, name: str) -> torch.Tensor:
        out = self._made.pop(name)
        if not self._made:
            self._x = None
        return out

    def _discard(self) -> None:
        """What was made and not asked for will not be made again."""
        if self._made:
            self._groups.pop(self._making, None)
            self._x, self._made = None, {}

    def _close_group(self) -> None:
        """More than one have met the same inputs: they are a group."""
        if len(self._run) > 1:
            self._groups.setdefault(self._run[0], self._run)
        self._x, self._run = None, []
