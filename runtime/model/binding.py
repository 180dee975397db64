"""Puts a stage's weights in the places of a module's absent parameters, for as long as any lane is inside the module.

`torch.func.functional_call` undoes each call's swap when that call returns, so calls must return last in, first out.
Lanes that park inside a layer leave it in the order in which they came: the first to leave would take the weights away
from the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch


class Binding:
    """`names` are those of parameters and buffers inside `module`. Not thread-safe: lanes share one thread."""

    def __init__(self, module: torch.nn.Module, names: Sequence[str]):
        self._places = {name: _place(module, name) for name in names}
        self._num_inside = 0
        self._absent: dict[str, torch.Tensor | None] = {}

    @contextmanager
    def bound(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Mutates the module. Lanes that are inside at the same time must bring the same weights: the first one's are
        used."""
        if not self._num_inside:
            places = {name: self._places[name] for name in weights}
            self._absent = {name: tensors.get(leaf) for name, (tensors, leaf) in places.items()}
            self._put(weights)
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._put(self._absent)

    def _put(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        for name, tensor in tensors.items():
            places, leaf = self._places[name]
            places[leaf] = tensor


def _place(module: torch.nn.Module, name: str) -> tuple[dict[str, torch.Tensor | None], str]:
    """Returns the tensors of the module that owns it, and its name there."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    places = owner._parameters if leaf in owner._parameters else owner._buffers
    return cast("dict[str, torch.Tensor | None]", places), leaf  # plain tensors stand in for parameters
