"""How much memory the tensors of a piece of work take together."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Of tensors that were made inside and are still there; `others` were there before."""

    def __init__(self, others: Iterable[torch.Tensor] = ()):
        super().__init__()
        self._others = [tensor.untyped_storage() for tensor in others]
        self._now, self.peak, self._known = 0, 0, {storage._cdata for storage in self._others}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._gone, key, num_bytes)
            self._now += num_bytes
            self.peak = max(self.peak, self._now)

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._now -= num_bytes
