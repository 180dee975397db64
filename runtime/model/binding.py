"""Puts a stage's weights in the places of a module's absent parameters, for as long as any lane is inside the module.

`torch.func.functional_call` undoes each call's swap when that call returns, so calls must return last in, first out.
Lanes that park inside a layer leave it in the order in which they came: the first to leave would take the weights away
from the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias, cast

import torch

from ..linear.stored import StoredWeight

_Tensors: TypeAlias = dict[str, torch.Tensor | None]  # of a module, by name


class Binding:
    """`names` are those of parameters and buffers inside `module`, which weights have behind `prefix`. Not thread-safe:
    lanes share one thread."""

    def __init__(self, module: torch.nn.Module, names: Sequence[str], prefix: str = ""):
        self._places = [(prefix + name, *_place(module, name)) for name in names]
        self._num_inside = 0
        self._absent: list[torch.Tensor | None] = []  # what stands in these places while nobody is inside
        self._stored: dict[str, StoredWeight] = {}

    def enter(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, StoredWeight]:
        """Mutates the module, until as many lanes have left it. Those that are inside at the same time must bring the
        same weights, of which some may be missing: the first one's are used. Returns those that stay as stored."""
        self._num_inside += 1
        if self._num_inside > 1:
            return self._stored
        if not self._absent:
            self._absent = [tensors.get(leaf) for _, tensors, leaf in self._places]
        for name, tensors, leaf in self._places:
            if name in weights:
                weight = tensors[leaf] = weights[name]
                if weight.__class__ is not torch.Tensor and isinstance(weight, StoredWeight):
                    self._stored[name] = weight
        return self._stored

    def leave(self) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            for (_, tensors, leaf), absent in zip(self._places, self._absent, strict=True):
                tensors[leaf] = absent
            self._stored.clear()

    @contextmanager
    def bound(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Mutates the module: a lane is inside."""
        self.enter(weights)
        try:
            yield
        finally:
            self.leave()


def _place(module: torch.nn.Module, name: str) -> tuple[_Tensors, str]:
    """Returns the tensors of the module that owns it, and its name there."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    places = owner._parameters if leaf in owner._parameters else owner._buffers
    return cast("_Tensors", places), leaf  # plain tensors stand in for parameters
