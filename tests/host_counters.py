"""What a pass costs the host in front of a device, counted on a double: waits for the device, operators that are
launched, copies over the link.

The double computes in host memory, so which tensors a device would hold is told from where they come from: its
buffers, what is made with a device named, and whatever an operator makes of these. That mark is on the storage. A
wait is counted where torch for CUDA waits (its sources: `_local_scalar_dense`, `nonzero` and all that is made of it,
blocking copies, of which `torch.tensor(..., device=)` is one), with the line that caused it, be it ours or of a
model's class.
Only the thread that began to count is counted.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from runtime.linear import blocks as panels
from runtime.stream.device import CopyPart
from tests.fake_device import FakeDevice, FakeEvent, FakeStream
from tests.fake_recording import tensors_among
from tests.host_counts import HostCounts, LinkCopy

ROOT = Path(__file__).resolve().parents[1]
WAITS = {  # by how often
    "_local_scalar_dense": 1, "nonzero": 1, "bincount": 2, "_unique2": 1, "unique_dim": 1, "unique_consecutive": 1,
    "masked_select": 1, "equal": 1, "multinomial": 2, "is_nonzero": 1,
}  # fmt: skip
SHAPES = {  # make views, or nothing that a device would have to do
    "view", "_unsafe_view", "_reshape_alias", "transpose", "slice", "select", "unsqueeze", "squeeze", "expand", "t",
    "as_strided", "detach", "detach_", "alias", "split", "split_with_sizes", "permute", "unbind", "lift_fresh",
    "unfold", "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "is_pinned", "diagonal",
    "sym_size", "sym_numel", "sym_stride", "resize_",
}  # fmt: skip
FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "zeros")
DOUBLE = ("fake_device.py", "fake_streams.py")
FOREIGN = ("torch/", "tests/host_counters.py", "unittest/mock.py", "contextlib.py")


class HostCounter(TorchDispatchMode):
    """Counts while `counting` is open; `take` gives what has come together since the last call."""

    def __init__(self) -> None:
        super().__init__()
        self._thread, self._counts = threading.get_ident(), HostCounts()

    def take(self) -> HostCounts:
        counts, self._counts = self._counts, HostCounts()
        return counts

    def sync(self, what: str, times: int = 1) -> None:
        if threading.get_ident() == self._thread and (where := _place()):
            self._counts.syncs[f"{what} {where}"] += times

    def timed(self) -> None:
        if threading.get_ident() == self._thread:
            self._counts.timed[_place() or "?"] += 1

    def batch(self, parts: Sequence[CopyPart]) -> None:
        where = _place() or "?"
        copies = tuple(LinkCopy(part.source.nbytes, on_device(part.source), where) for part in parts)
        self._counts.copies += copies
        self._counts.batches.append(copies)

    def crossing(self, source: torch.Tensor, *, is_down: bool, is_blocking: bool) -> None:
        """A copy that torch makes by itself."""
        if where := _place():
            self._counts.copies.append(LinkCopy(source.nbytes, is_down, where))
            if is_blocking:
                self.sync("copy to host" if is_down else "copy to device")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose() and func.name() not in ("aten::equal",):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        name = func.name().removeprefix("aten::").split(".")[0]
        given = [tensor for tensor in tensors_among((args, kwargs)) if on_device(tensor)]
        made = func(*args, **kwargs)
        if name in ("copy_", "_to_copy") and self._is_link_copy(name, args, kwargs):
            return made
        if given:
            self._count(name, args, kwargs)
            for tensor in tensors_among(made):
                mark(tensor)
        return made

    def _is_link_copy(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name != "copy_":
            return False
        target, source, *rest = args
        if on_device(target) == on_device(source):
            return False
        is_queued = bool(kwargs.get("non_blocking", rest[0] if rest else False))
        self.crossing(source, is_down=on_device(source), is_blocking=not is_queued)
        return True

    def _count(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        where = _place()
        if where is None:
            return
        times = WAITS.get(name, 0)
        if name in ("index", "index_put_", "_index_put_impl_"):
            times = _num_masks(*args)
            if from_host := sum(index is not None and not on_device(index) for index in args[1]):
                self.sync("index from host", from_host)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            times = 1
        if times:
            self.sync(name, times)
        if name not in SHAPES and name != "_local_scalar_dense":
            self._counts.launches[f"{name} {where}"] += 1


def _num_masks(target: torch.Tensor, indices: Sequence[torch.Tensor | None], *values: Any) -> int:
    """Of what is indexed by masks; one number under a mask becomes masked_fill."""
    if values and values[0].numel() == 1:
        return 0
    return sum(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """As the device's."""
    if tensor.layout is torch.strided:
        tensor.untyped_storage().is_on_device = True  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def on_device(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and getattr(tensor.untyped_storage(), "is_on_device", False)


def _place() -> str | None:
    """The innermost line outside of torch and of this module, with those that called it where it is the device's own;
    None where the double works in the device's place."""
    frame: FrameType | None = sys._getframe(1)
    names: list[str] = []
    while frame is not None and len(names) < 8:
        file = frame.f_code.co_filename
        if file.endswith(DOUBLE):
            return " < ".join(names) or None
        is_ours = file.startswith(str(ROOT)) and "site-packages" not in file
        name = file[len(str(ROOT)) + 1 :] if is_ours else file.split("site-packages/")[-1]
        if not name.startswith(FOREIGN) and not name.endswith(FOREIGN):
            names.append(f"{name}:{frame.f_lineno}")
            if not file.endswith(("stream/device.py", "stream/clock.py")):
                break
        frame = frame.f_back
    return " < ".join(names) or "?"


@contextmanager
def counting() -> Iterator[HostCounter]:
    """Open it before the session, so that what the session makes is known; devices must be `CountedDevice`."""
    counter = HostCounter()
    with ExitStack() as stack:

        def patch(owner: object, name: str, wrapped: Callable[..., Any]) -> None:
            original = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, lambda *a, **k: wrapped(original, *a, **k)))

        for name in ("tensor", "as_tensor"):
            patch(torch, name, _uploading(counter))
        for name in FACTORIES:
            patch(torch, name, _placed)
        patch(torch.Tensor, "to", _moving(counter))
        for name in ("tolist", "cpu", "numpy"):
            patch(torch.Tensor, name, _reading(counter, name))
        for kind in (FakeStream, FakeEvent):
            patch(kind, "synchronize", _waiting(counter, kind.__name__.removeprefix("Fake")))
        stack.enter_context(mock.patch.object(CountedDevice, "counter", counter))
        stack.enter_context(mock.patch.object(panels, "_buffers", panels._Buffers()))  # none from before the marks
        stack.enter_context(counter)
        yield counter


def _names_device(device: object) -> bool:
    """The double's is called cpu too; whoever means the host's memory writes the word."""
    return isinstance(device, torch.device) and device.type != "meta"


def _placed(original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    made = original(*args, **kwargs)
    return mark(made) if _names_device(kwargs.get("device")) else made


def _uploading(counter: HostCounter) -> Callable[..., torch.Tensor]:
    def made(original: Callable[..., torch.Tensor], *args: Any, device: object = None, **kwargs: Any) -> torch.Tensor:
        found = original(*args, device=device, **kwargs)
        if _names_device(device) and not on_device(found):
            counter.crossing(found, is_down=False, is_blocking=True)
            mark(found)
        return found

    return made


def _moving(counter: HostCounter) -> Callable[..., torch.Tensor]:
    def made(original: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = kwargs.get("device", args[0] if args else None)
        found = original(tensor, *args, **kwargs)
        if _names_device(target) and not on_device(found):
            counter.crossing(found, is_down=False, is_blocking=not kwargs.get("non_blocking", False))
            return mark(found.clone() if found.untyped_storage() is tensor.untyped_storage() else found)
        return found

    return made


def _reading(counter: HostCounter, name: str) -> Callable[..., Any]:
    def made(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if on_device(tensor):
            counter.crossing(tensor, is_down=True, is_blocking=True)
            tensor = tensor if name == "numpy" else _host_copy(tensor)  # a kernel of the CPU's may write to it
        return original(tensor, *args, **kwargs)

    return made


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        return tensor.clone()


def _waiting(counter: HostCounter, what: str) -> Callable[..., None]:
    def made(original: Callable[..., None], waited: object) -> None:
        if sys._getframe(2).f_code.co_filename.endswith(DOUBLE):
            original(waited)  # the double's own way to keep compute behind
            return
        counter.sync(f"{what}.synchronize")
        original(waited)

    return made


class CountedDevice(FakeDevice):
    """Tells the counter that is open, of all that its own methods do."""

    counter: HostCounter | None = None

    def __init__(self, late: tuple[bool, ...] = (), **settings: bool):
        super().__init__(late, **settings)
        begin = self.clock.begin

        def counted(stream: torch.Stream | None = None) -> Any:
            if self.counter is not None:
                self.counter.timed()
            return begin(stream)

        self.clock.begin = counted

    def compute_buffer(self, num_bytes: int) -> torch.Tensor:
        return mark(super().compute_buffer(num_bytes))

    def zeros(self, num_bytes: int) -> torch.Tensor:
        return mark(super().zeros(num_bytes))

    def copy_all(self, parts: Sequence[CopyPart], **order: Any) -> None:
        if self.counter is not None:
            self.counter.batch(parts)
        super().copy_all(parts, **order)
