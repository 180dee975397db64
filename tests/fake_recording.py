"""A recording of operators on an accelerator that is made of host memory: they run again on the memory that they ran on
first, and nothing else does."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

WAITS = ("_local_scalar_dense", "nonzero", "bincount", "_unique2", "equal", "is_nonzero", "masked_select")
READS = ("tolist", "cpu", "numpy", "item")


class Tape(TorchDispatchMode):
    """Records what runs while it is open. As on a device, asking for a number fails, and what was made is not there
    before the first replay: `forget` spoils it."""

    current: ClassVar["Tape | None"] = None

    def __init__(self) -> None:
        super().__init__()
        self._works: list[Callable[[], None]] = []
        self._made: list[torch.Tensor] = []
        self._patches = ExitStack()

    def __enter__(self) -> "Tape":
        Tape.current = self
        for name in READS:
            patch = mock.patch.object(torch.Tensor, name, _refusing(getattr(torch.Tensor, name)))
            self._patches.enter_context(patch)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        Tape.current = None
        super().__exit__(*error)

    @classmethod
    @contextmanager
    def paused(cls) -> Iterator[None]:
        """Within it a double does what a device would do by itself."""
        tape, cls.current = cls.current, None
        try:
            with _disable_current_modes():
                yield
        finally:
            cls.current = tape

    def add(self, work: Callable[[], None]) -> None:
        """Something that does not run in torch's operators."""
        self._works.append(work)

    def replay(self) -> None:
        with torch.inference_mode():
            for work in self._works:
                work()

    def forget(self) -> None:
        with torch.inference_mode():
            for tensor in self._made:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.name().removeprefix("aten::").split(".")[0] in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.name()}")
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors_among((args, kwargs))}
        made = func(*args, **kwargs)
        fresh = [tensor for tensor in tensors_among(made) if tensor.untyped_storage().data_ptr() not in known]
        self._made += fresh

        def again() -> None:
            for old, new in zip(tensors_among(made), tensors_among(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self._works.append(again)
        return made


def _refusing(read: Callable[..., Any]) -> Callable[..., Any]:
    def refused(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if Tape.current is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {read.__name__}")
        return read(tensor, *args, **kwargs)

    return refused


def tensors_among(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_among(each)
    elif isinstance(value, dict):
        yield from tensors_among(list(value.values()))
