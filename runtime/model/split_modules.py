"""Modules of which each of several ranks computes a part: rows of their matrices, and of what these make.

Every matrix is cut by its rows, the numbers that it makes. So each number is summed by one rank, in the order in which
a single device sums it, and parts are put side by side, never added up. Modules stay what they are: hooks make inputs
and outputs whole.
"""

from typing import Any, cast

import torch
from torch import nn

from ..ranks.collectives import Gathering


def shorten(module: nn.Module, height: int) -> None:
    """Leaves the module's parameters so many rows. Mutates the module."""
    for name, each in module._parameters.items():
        if each is not None:
            short = torch.empty(height, *each.shape[1:], dtype=each.dtype, device=each.device)
            module._parameters[name] = nn.Parameter(short, requires_grad=False)


def split_linear(module: nn.Linear, gathering: Gathering, *, takes_part: bool, gives_part: bool) -> None:
    """Makes it a map to this rank's numbers. `takes_part`: what comes is a part as well, and is made whole first.
    `gives_part`: what goes on is one. Mutates the module."""
    module.out_features //= gathering.count
    shorten(module, module.out_features)
    if takes_part:
        module.register_forward_pre_hook(lambda _, given: _first_whole(gathering, given))
    if not gives_part:
        module.register_forward_hook(lambda _, given, out: gathering.whole(cast(torch.Tensor, out)))


def _first_whole(gathering: Gathering, given: Any) -> tuple[Any, ...]:
    return gathering.whole(given[0]), *given[1:]


def split_embedding(module: nn.Embedding, gathering: Gathering) -> None:
    """Makes it a table of this rank's rows, which looks up the others' with them. Mutates the module."""
    module.num_embeddings //= gathering.count
    module.padding_idx = None  # matters to gradients alone, and may be another rank's
    shorten(module, module.num_embeddings)
    lookup = _Lookup(gathering, module.num_embeddings)
    module.register_forward_pre_hook(lookup.before)
    module.register_forward_hook(lookup.behind)


class _Lookup:
    """What lies around the look-up of token ids (B, T) in a table of `height` rows, which gives (B, T, D)."""

    def __init__(self, gathering: Gathering, height: int):
        self._gathering, self._height, self._is_here = gathering, height, torch.empty(0)

    def before(self, module: nn.Module, given: Any) -> tuple[Any, ...]:
        places = given[0] - self._gathering.index * self._height
        self._is_here = (places >= 0) & (places < self._height)
        return torch.where(self._is_here, places, 0), *given[1:]

    def behind(self, module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
        return self._gathering.sum(torch.where(self._is_here[..., None], out, torch.zeros_like(out)))
