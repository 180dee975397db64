"""Reads rows of embedding tables when a pass looks them up, so that the other rows are never read.

A table may have a hundred times the bytes of the layers around it (n-gram tables, per-layer embeddings), and a token
needs a few of its rows. A lookup sorts its ids, reads each disk block that has a wanted row once, and takes the rows
out of the blocks.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from ..linear.blocks import dequantize_rows
from ..plan.placement.memory import GATHERED_BLOCK_BYTES, gathered_bytes
from ..plan.shape.extents import ALIGNMENT_BYTES, Extent
from ..plan.shape.shapes import Parameter, Stage
from ..resources import Resource
from ..store.reader import Reader
from ..stream.clock import StreamCounters
from ..stream.device import ComputeDevice
from ..trace import Trace
from ..weights.stage_weights import stored_rows

Lookup = Callable[[torch.Tensor], torch.Tensor]  # row numbers (N,) on the CPU, sorted and distinct -> rows (N, K)


class GatheredWeight(torch.Tensor):
    """Looks like the table's parameter to the model. Only lookups of rows are possible."""

    lookup: Lookup

    @staticmethod
    def __new__(
        cls, lookup: Lookup, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> "GatheredWeight":
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        self.lookup = lookup
        return self

    def __init__(self, *args: object) -> None:
        super().__init__()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows (..., K) of `ids` (...), on the device of `ids`."""
        wanted, positions = torch.unique(ids.cpu(), return_inverse=True)
        if len(wanted) and not 0 <= int(wanted[0]) <= int(wanted[-1]) < self.shape[0]:
            raise IndexError(f"row {int(wanted[-1] if wanted[0] >= 0 else wanted[0])} of a table of {self.shape[0]:,}")
        return F.embedding(positions.to(ids.device), self.lookup(wanted).to(ids.device))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is F.embedding:
            ids, table = args[:2] if len(args) > 1 else (args[0], (kwargs or {})["weight"])
            assert isinstance(ids, torch.Tensor), "ids are a tensor"
            assert isinstance(table, GatheredWeight), "ids are not a table"
            return table.rows(ids)
        if func is torch.Tensor.__getitem__ and isinstance(table := args[0], GatheredWeight):
            index = args[1]
            row, rest = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
            assert type(row) is int, "the probe found rows only"
            values = table.rows(torch.tensor(row % table.shape[0], device=table.device))
            return values[rest] if rest else values
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        raise NotImplementedError(f"{func} needs a whole table: set offload.gather_tables=false")


class TableStream:
    """The tables of a session. Not thread-safe: only the engine calls it."""

    def __init__(
        self,
        stages: Sequence[Stage],
        dtypes: Mapping[str, torch.dtype],
        device: ComputeDevice,
        reader: Reader,
        trace: Trace | None = None,
    ):
        """`dtypes`: the compute dtype of each parameter, by full name."""
        self._device, self._reader, self._trace = device, reader, trace
        self._counters, self._buffer = StreamCounters(), None
        self._weights: dict[int, dict[str, torch.Tensor]] = {}  # by stage and full name
        for stage in stages:
            for table in stage.tables:
                dtype = dtypes[table.name]
                lookup = partial(self._look_up, stage, table, dtype)
                weight = GatheredWeight(lookup, table.shape, dtype, device.torch_device)
                self._weights.setdefault(stage.index, {})[table.name] = weight

    def weights(self, stage: int) -> Mapping[str, torch.Tensor]:
        """The stage's tables by full name."""
        return self._weights.get(stage, {})

    def take_counters(self) -> StreamCounters:
        counters, self._counters = self._counters, StreamCounters()
        return counters

    def _look_up(self, stage: Stage, table: Parameter, dtype: torch.dtype, ids_N: torch.Tensor) -> torch.Tensor:
        """Reads the rows `ids_N`, in parts whose blocks fit the buffer."""
        step = max(1, GATHERED_BLOCK_BYTES // gathered_bytes(table.row_bytes))
        parts = [self._read_rows(stage, table, dtype, ids) for ids in ids_N.split(step)] if len(ids_N) else []
        return torch.cat(parts) if parts else torch.empty(0, table.shape[1], dtype=dtype)

    def _read_rows(self, stage: Stage, table: Parameter, dtype: torch.dtype, ids_N: torch.Tensor) -> torch.Tensor:
        [[source]], size = table.pieces, table.row_bytes
        begins_N = source.offset + ids_N.numpy() * size
        extents, slots_N = plan_blocks(source.file, begins_N, size)
        buffer = self._take_buffer(extents[-1].slot_offset + extents[-1].num_bytes)
        begin = time.monotonic()
        pending = self._reader.gather(extents, buffer.numpy().data)
        pending.wait()
        timing = pending.timing
        self._counters.bytes_read += timing.num_bytes
        self._counters.reads[stage.index] += timing.end - timing.begin
        self._counters.stalls[stage.index] += time.monotonic() - begin
        if self._trace is not None:
            name = f"rows of {table.name}"
            self._trace.span(Resource.disk, name, timing.begin, timing.end, num_bytes=timing.num_bytes)
        windows = np.lib.stride_tricks.sliding_window_view(buffer.numpy(), size)
        block = stored_rows(source, torch.from_numpy(windows[slots_N]).view(-1), len(ids_N))
        # A copy, as plain rows of the compute dtype would be a view into the buffer.
        return dequantize_rows(block, dtype)

    def _take_buffer(self, num_bytes: int) -> torch.Tensor:
        if self._buffer is None or len(self._buffer) < num_bytes:
            self._buffer = None  # freed before the larger one is made
            self._buffer = self._device.host_buffer(num_bytes)
        return self._buffer


def plan_blocks(file: str, begins_N: np.ndarray, size: int) -> tuple[list[Extent], np.ndarray]:
    """Plans reads of rows of `size` bytes at the ascending file offsets `begins_N`. Returns aligned extents, one behind
    the other in a buffer, that have all rows, and the offset of each row in that buffer. Adjacent blocks are one
    extent, and no block is read twice."""
    firsts_N, ends_N = begins_N // ALIGNMENT_BYTES, -(-(begins_N + size) // ALIGNMENT_BYTES)  # blocks
    is_new_N = np.append(True, firsts_N[1:] > ends_N[:-1])
    is_last_N = np.append(is_new_N[1:], True)
    starts_G = firsts_N[is_new_N] * ALIGNMENT_BYTES
    sizes_G = ends_N[is_last_N] * ALIGNMENT_BYTES - starts_G
    used_G = begins_N[is_last_N] + size - starts_G
    slots_G = np.cumsum(sizes_G) - sizes_G
    columns = zip(starts_G.tolist(), sizes_G.tolist(), used_G.tolist(), slots_G.tolist(), strict=True)
    extents = [
        Extent(file=file, offset=start, num_bytes=num_bytes, used_bytes=used, slot_offset=slot)
        for start, num_bytes, used, slot in columns
    ]
    groups_N = np.cumsum(is_new_N) - 1
    return extents, slots_G[groups_N] + begins_N - starts_G[groups_N]
