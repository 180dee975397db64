"""What every KV cache of a lane offers the engine: which pages it holds, and memory for those that travel."""

from abc import abstractmethod
from collections.abc import Sequence

import torch

from ..closing import Closing


class KVCache(Closing):
    """Keys and values of one lane, from its first pass until `close`, which gives its pages back to the pool.

    Layers may keep their pages in another tier. Before the lane enters such a layer the engine brings `pages` to memory
    of its own and binds it; behind the layer it unbinds it and stores what is in `changed`. Layers that do not travel
    hold their keys and values themselves and are never bound. One thread calls all of it.
    """

    @property
    @abstractmethod
    def pages(self) -> Sequence[int]:
        """Numbers of the lane's pages, the same in every layer. Their order and number hold for one pass; the next one
        may take or give back pages. Empty where no layer travels and the lane has a rectangle."""

    @property
    @abstractmethod
    def changed(self) -> Sequence[int]:
        """Positions in `pages`, ascending, of the pages that the pass writes to. It holds for one pass."""

    @abstractmethod
    def bind(self, layer: int, pages: torch.Tensor) -> None:
        """Has the layer read and write its keys and values in `pages` (len(self.pages), bytes of a page), uint8, until
        `unbind`. The memory stays the caller's, who must not reuse it before. A layer that does not travel ignores
        it."""

    @abstractmethod
    def unbind(self, layer: int) -> None:
        """Lets go of the memory that was bound, which then holds what the layer has written, padding included. Raises
        KeyError where a layer that travels was not bound."""
