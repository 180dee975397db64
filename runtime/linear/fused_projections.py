"""Fuses projections of the same input, such as query, key and value, into one product: inputs are laid out once,
threads synchronize once, and small weights share threads with large ones. A module's first forward pass shows which
weights multiply the same tensor one after the other; these form a group."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..config.profiles import BackendTable
from .backends import fused_linear, linear
from .blocks import Block


class FusedProjections:
    """Fused projections of one module. Not thread-safe: lanes share one thread. Results equal those of `linear`; they
    are bit-identical if it chooses the same backend for each weight."""

    def __init__(self) -> None:
        self._is_learning = True
        self._groups: dict[str, list[str]] = {}  # weight names in order of use, by the first one
        self._x: torch.Tensor | None = None
        self._current_group: list[str] = []  # while learning: weights that multiplied `_x`
        self._outputs: dict[str, torch.Tensor] = {}  # products of `_x` that are not fetched yet
        self._leader = ""  # first name of the group in `_outputs`
        self._num_lanes = 0
        self._blocks: dict[str, Sequence[Block]] = {}

    def multiply(
        self, x: torch.Tensor, x_MK: torch.Tensor, name: str, table: BackendTable | None = None
    ) -> torch.Tensor:
        """Returns x @ w.T (M, N) for the named weight. `x_MK` is `x` as rows; `x` identifies the input. `table`: see
        `linear`."""
        if x is self._x and name in self._outputs:
            return self._take(name)
        self._discard()
        if self._is_learning:
            if x is not self._x or name in self._current_group:
                self._close_group()
                self._x = x
            self._current_group.append(name)
        group = self._groups.get(name)
        if self._is_learning or group is None:
            return linear(x_MK, self._blocks[name], table)
        outs = fused_linear(x_MK, [self._blocks[member] for member in group], table)
        self._x, self._leader, self._outputs = x, name, dict(zip(group, outs, strict=True))
        return self._take(name)

    @contextmanager
    def scope(self, blocks: Mapping[str, Sequence[Block]]) -> Iterator[None]:
        """Registers a lane's weights by name while it runs the module. Learning ends when the first lane leaves. Lanes
        in the module at the same time must register the same weights."""
        self._blocks |= blocks
        self._num_lanes += 1
        try:
            yield
        finally:
            self._num_lanes -= 1
            self._discard()
            if self._current_group:
                self._close_group()
                self._is_learning = False
            if not self._num_lanes:
                self._blocks.clear()

    def _take(self, name: str) -> torch.Tensor:
        out = self._outputs.pop(name)
        if not self._outputs:
            self._x = None
        return out

    def _discard(self) -> None:
        """Discards products that were not fetched, and their group."""
        if self._outputs:
            self._groups.pop(self._leader, None)
            self._x, self._outputs = None, {}

    def _close_group(self) -> None:
        """Ends a series of products of one input; two or more weights form a group."""
        if len(self._current_group) > 1:
            self._groups.setdefault(self._current_group[0], self._current_group)
        self._x, self._current_group = None, []
