"""Fuses projections of the same input, such as query, key and value, into one product: inputs are laid out once,
threads synchronize once, and threads split the rows of all weights evenly.

A module's first forward pass shows which weights multiply the same tensor one after the other; these form a group. In
later passes, the first product of a group computes the products of all its weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..config.profiles import BackendTable
from .backends import fused_linear, linear
from .blocks import Block


class FusedProjections:
    """Fused projections of one module. Not thread-safe: lanes (micro-batches, each with a coroutine) share one thread.
    Results are those of `linear`, and bit-identical if `linear` chooses the same backend for each weight."""

    def __init__(self) -> None:
        self._is_learning = True
        self._groups: dict[str, list[str]] = {}  # per group, by its first weight: names of its weights in order of use
        self._x: torch.Tensor | None = None  # input of the latest product
        self._current_group: list[str] = []  # while learning: weights that multiplied `_x`
        self._outputs: dict[str, torch.Tensor] = {}  # by weight: products with `_x`, not yet returned
        self._leader = ""  # first weight of the group whose products are in `_outputs`
        self._num_lanes = 0  # lanes inside `scope`
        self._blocks: dict[str, Sequence[Block]] = {}  # row blocks of registered weights by name

    def multiply(
        self, x: torch.Tensor, x_MK: torch.Tensor, name: str, table: BackendTable | None = None
    ) -> torch.Tensor:
        """Returns x @ w.T (M, N) for the weight `name`. `x`: the input; products of a group have the identical
        tensor. `x_MK`: the same input as a matrix. `table`: see `linear`."""
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
        """Registers a lane's weights by name, while the lane runs the module inside the `with` block. Learning ends
        when the first lane leaves the block. Lanes that are in the module at the same time must register the same
        weights."""
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
        """Returns a product of the current group that was computed before."""
        out = self._outputs.pop(name)
        if not self._outputs:
            self._x = None
        return out

    def _discard(self) -> None:
        """Discards products that `multiply` has not returned, and dissolves their group, as its weights are not used
        together."""
        if self._outputs:
            self._groups.pop(self._leader, None)
            self._x, self._outputs = None, {}

    def _close_group(self) -> None:
        """Ends a series of products with one input; two or more weights form a group."""
        if len(self._current_group) > 1:
            self._groups.setdefault(self._current_group[0], self._current_group)
        self._x, self._current_group = None, []
