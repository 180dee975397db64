"""Layers of a packed lane (micro-batch) whose KV pages are in host memory. The CPU computes attention for decoding
rows, which have one new token (MoE-Lightning, Cao et al. 2025). In prefill, attention runs on the compute device:
cached keys and values are copied to the device, and new ones to their pages in host memory.

A place is the index of a position in the cache: page number x 16 + offset in the page. Shapes: see paged.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..attention.host_attention import decode_attention
from ..attention.layout import LayerKV, PassLayout, Places, copy_places
from ..attention.views import DecodeRows, Reach, Rule, Segment, TokenRanges
from ..stream.device import CopyPart
from ..stream.exchange import HostExchange, RoundTrip
from .pages import KVPages

CPU = torch.device("cpu")


@dataclass(frozen=True)
class HostLayerKV(LayerKV):
    """The pages of layer `index` in host memory. `key` and `value` (1, H, T, D): the pass's, in compute memory."""

    index: int
    key: torch.Tensor
    value: torch.Tensor
    exchange: HostExchange

    def gather_row(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Collects all keys and values of one row in compute memory: copies cached ones, appends new ones."""
        sources = (self.k_NPHD, self.key), (self.v_NPHD, self.value)
        rows_SHD = [
            self.exchange.new_tensor((segment.end, pages.shape[2], pages.shape[3]), pages.dtype) for pages, _ in sources
        ]
        copies = list[CopyPart]()
        for (pages, _), row in zip(sources, rows_SHD, strict=True):
            flat = pages.flatten(0, 1)
            for place, index, num in self.layout.runs(segment.row, 0, segment.past):
                copies.append(CopyPart(flat[place : place + num], row[index : index + num]))
        self.exchange.load(self.index, copies)
        for (_, new), row in zip(sources, rows_SHD, strict=True):
            row[segment.past :] = new[0, :, segment.start : segment.start + segment.new].transpose(0, 1)
        return rows_SHD[0].transpose(0, 1), rows_SHD[1].transpose(0, 1)

    def gather_packed(self, ranges: TokenRanges) -> tuple[torch.Tensor, torch.Tensor]:
        """Collects keys and values of several ranges in compute memory, concatenated, with one load of all cached
        ones."""
        sources = (self.k_NPHD, self.key[0]), (self.v_NPHD, self.value[0])
        packed_SHD = [
            self.exchange.new_tensor((ranges.num_positions, pages.shape[2], pages.shape[3]), pages.dtype)
            for pages, _ in sources
        ]
        copies, begin = list[CopyPart](), 0
        for part in ranges.parts:
            # Positions [begin, middle) of the result are cached, [middle, end) are new.
            middle, end = begin + part.past - part.first, begin + part.num_positions
            for (pages, new_HTD), packed in zip(sources, packed_SHD, strict=True):
                flat = pages.flatten(0, 1)
                for place, index, num in self.layout.runs(part.row, part.first, part.past):
                    copies.append(CopyPart(flat[place : place + num], packed[begin + index : begin + index + num]))
                packed[middle:end] = new_HTD[:, part.start : part.start + part.new].transpose(0, 1)
            begin = end
        self.exchange.load(self.index, copies)
        return packed_SHD[0], packed_SHD[1]


class HostAttention:
    """CPU attention in one layer, for a lane's decoding rows and their pages in host memory."""

    def __init__(
        self,
        round_trip: RoundTrip,
        kv: LayerKV,
        rows: DecodeRows,
        tokens_B: torch.Tensor,
        copies: tuple[Places, Places] | None,
    ):
        """`round_trip`: the copies of inputs to host memory and of outputs back. `copies`: (sources, targets) of
        partial pages to copy, for rows that diverge from a shared prefix or beam."""
        self._round_trip, self._kv, self._rows, self._tokens_B, self._copies = round_trip, kv, rows, tokens_B, copies

    def attend(self, reach: Reach, *, scale: float, softcap: float | None, num_threads: int) -> torch.Tensor:
        """Waits for the inputs, stores the new keys and values, computes attention, and queues the copy of the outputs
        (B, H, D) to compute memory. Returns the target of this copy, which is valid after `receive`. Any thread may
        call it."""
        q_BHD, k_BHD, v_BHD, *sinks = self._round_trip.wait_for_inputs()
        layout, rows = self._kv.layout, self._rows
        layout.new_T.scatter(self._kv.k_NPHD, k_BHD)
        layout.new_T.scatter(self._kv.v_NPHD, v_BHD)
        if self._copies is not None:
            copy_places(self._kv, self._copies)
        out_BHD = decode_attention(
            q_BHD,
            self._kv.k_NPHD,
            self._kv.v_NPHD,
            layout.tables_Bn,
            rows.begins(reach),
            rows.ends,
            Rule(scale, softcap, sinks[0] if sinks else None),
            num_threads,
        )
        self._round_trip.send_output(out_BHD)
        return self._round_trip.out

    def receive(self, out_THD: torch.Tensor) -> torch.Tensor:
        """Writes the attention outputs of the decoding tokens into `out_THD` and returns it. Valid for computations
        that are queued on the device after this call."""
        out_BHD = self._round_trip.receive()
        if out_THD is not out_BHD:
            out_THD[self._tokens_B] = out_BHD
        return out_THD


class HostLane:
    """The layers of one packed lane whose pages are in host memory."""

    def __init__(self, pages: KVPages, exchange: HostExchange):
        self._pages, self._exchange = pages, exchange

    def begin_pass(
        self,
        pages: Sequence[Sequence[int]],
        decoding: DecodeRows | None,
        segments: Sequence[Segment],
        copies: tuple[Places, Places] | None = None,
    ) -> None:
        """Begins a pass. `pages`: page numbers of each row. `copies`: (sources, targets) of partial pages to copy for
        decoding rows."""
        self._rows, self._segments, self._copies = None, segments, copies
        if decoding is not None:  # token indices start at 0, since only the decoding tokens are copied to the host
            self._rows = DecodeRows(decoding.rows, decoding.past, tuple(range(len(decoding.rows))), CPU)
        new_positions = [] if decoding is None else zip(decoding.rows, decoding.past, strict=True)
        self._layout = PassLayout(
            pages, [(row, past, past + 1) for row, past in new_positions], self._rows, segments, CPU, expands=False
        )

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> HostLayerKV:
        k_NPHD, v_NPHD = self._pages.layer(index, key, value)
        return HostLayerKV(k_NPHD, v_NPHD, self._layout, index, key, value, self._exchange)

    def store_prompts(self, index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Queues copies of the prompts' keys and values (1, H, T, D) to their pages in host memory."""
        pairs = zip(self._pages.layer(index, key, value), (key, value), strict=True)
        copies = [copy for pages, new in pairs for copy in self._new_token_copies(pages, new)]
        if copies:
            self._exchange.store(index, copies)

    def _new_token_copies(self, pages_NPHD: torch.Tensor, new_1HTD: torch.Tensor) -> Iterator[CopyPart]:
        """Yields the copies of the prompts' new keys or values to their pages."""
        if not self._segments:
            return
        flat, new_THD = pages_NPHD.flatten(0, 1), new_1HTD[0].transpose(0, 1).contiguous()
        for segment in self._segments:
            tokens = new_THD[segment.start : segment.start + segment.new]
            for place, index, num in self._layout.runs(segment.row, segment.past, segment.end):
                yield CopyPart(tokens[index : index + num], flat[place : place + num])

    def begin_attention(
        self,
        index: int,
        tokens_B: torch.Tensor,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        sinks_H: torch.Tensor | None,
    ) -> HostAttention:
        """Queues copies of the decoding tokens' queries, keys and values to host memory. `qkv`: those of all tokens,
        (1, H, T, D) each. `tokens_B`: indices of the decoding tokens."""
        assert self._rows is not None, "no row decodes"
        inputs = [t[0, :, tokens_B].transpose(0, 1).contiguous() for t in qkv]
        out = self._exchange.new_tensor((*inputs[0].shape[:2], inputs[2].shape[2]), inputs[2].dtype)
        sinks = [] if sinks_H is None else [sinks_H.float().contiguous()]
        round_trip = self._exchange.send(index, [*inputs, *sinks], out)
        return HostAttention(round_trip, self.layer(index, *qkv[1:]), self._rows, tokens_B, self._copies)
