"""A packed lane's pass through layers whose pages stay in host memory, where the CPU attends for rows that decode.

Only single tokens go down and their answers come up (MoE-Lightning, Cao et al. 2025). Prompts attend where the model
computes: what is cached of them comes up, what is new goes down, straight to its pages. Letters as in paged.py.
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
    """Pages of layer `index` in host memory; `key`, `value` (1, H, T, D) are those of the pass, in compute memory."""

    index: int
    key: torch.Tensor
    value: torch.Tensor
    exchange: HostExchange

    def gather_row(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        sources = (self.k_NPHD, self.key), (self.v_NPHD, self.value)
        rows_SHD = [
            self.exchange.new_tensor((segment.end, pages.shape[2], pages.shape[3]), pages.dtype) for pages, _ in sources
        ]
        copies = list[CopyPart]()
        for (pages, _), row in zip(sources, rows_SHD, strict=True):
            flat = pages.flatten(0, 1)
            for place, at, num in self.layout.runs(segment.row, 0, segment.past):
                copies.append(CopyPart(flat[place : place + num], row[at : at + num]))
        self.exchange.load(self.index, copies)
        for (_, new), row in zip(sources, rows_SHD, strict=True):
            row[segment.past :] = new[0, :, segment.start : segment.start + segment.new].transpose(0, 1)
        return rows_SHD[0].transpose(0, 1), rows_SHD[1].transpose(0, 1)

    def gather_packed(self, ranges: TokenRanges) -> tuple[torch.Tensor, torch.Tensor]:
        """All that is cached comes up at once."""
        sources = (self.k_NPHD, self.key[0]), (self.v_NPHD, self.value[0])
        packed_SHD = [
            self.exchange.new_tensor((ranges.num_positions, pages.shape[2], pages.shape[3]), pages.dtype)
            for pages, _ in sources
        ]
        copies, begin = list[CopyPart](), 0
        for part in ranges.parts:
            middle, end = begin + part.past - part.first, begin + part.num_positions
            for (pages, new_HTD), packed in zip(sources, packed_SHD, strict=True):
                flat = pages.flatten(0, 1)
                for place, at, num in self.layout.runs(part.row, part.first, part.past):
                    copies.append(CopyPart(flat[place : place + num], packed[begin + at : begin + at + num]))
                packed[middle:end] = new_HTD[:, part.start : part.start + part.new].transpose(0, 1)
            begin = end
        self.exchange.load(self.index, copies)
        return packed_SHD[0], packed_SHD[1]


class HostAttention:
    """Attention of the rows of a lane that decode, in one layer, beside their pages."""

    def __init__(
        self,
        round_trip: RoundTrip,
        kv: LayerKV,
        rows: DecodeRows,
        tokens_B: torch.Tensor,
        copies: tuple[Places, Places] | None,
    ):
        """`copies`: what rows that part from others copy of the page that is not full."""
        self._round_trip, self._kv, self._rows, self._tokens_B, self._copies = round_trip, kv, rows, tokens_B, copies

    def attend(self, reach: Reach, *, scale: float, softcap: float | None, num_threads: int) -> torch.Tensor:
        """Waits for this trip alone, on any thread, stores the new keys and values, and begins to send up what it
        returns: (B, H, D) in compute memory, which `receive` waits for."""
        q_BHD, k_BHD, v_BHD, *sinks = self._round_trip.wait_for_inputs()
        layout, rows = self._kv.layout, self._rows
        layout.new_T.scatter(self._kv.k_NPHD, k_BHD)
        layout.new_T.scatter(self._kv.v_NPHD, v_BHD)
        if self._copies is not None:
            copy_places(self._kv, self._copies)
        answer = decode_attention(
            q_BHD,
            self._kv.k_NPHD,
            self._kv.v_NPHD,
            layout.tables_Bn,
            rows.begins(reach),
            rows.ends,
            Rule(scale, softcap, sinks[0] if sinks else None),
            num_threads,
        )
        self._round_trip.send_answer(answer)
        return self._round_trip.out

    def receive(self, out_THD: torch.Tensor) -> torch.Tensor:
        """Where `out` is not the answer itself, the answer is put into it. For compute that is queued from now on."""
        answer_BHD = self._round_trip.receive()
        if out_THD is not answer_BHD:
            out_THD[self._tokens_B] = answer_BHD
        return out_THD


class HostLane:
    def __init__(self, pages: KVPages, exchange: HostExchange):
        self._pages, self._exchange = pages, exchange

    def begin_pass(
        self,
        pages: Sequence[Sequence[int]],
        decoding: DecodeRows | None,
        segments: Sequence[Segment],
        copies: tuple[Places, Places] | None = None,
    ) -> None:
        """`pages` of each row. Of the rows that decode the tokens go down, and are counted from 0 there. `copies` are
        of rows that decode."""
        self._rows, self._segments, self._copies = None, segments, copies
        if decoding is not None:
            self._rows = DecodeRows(decoding.rows, decoding.past, tuple(range(len(decoding.rows))), CPU)
        new = [] if decoding is None else zip(decoding.rows, decoding.past, strict=True)
        self._layout = PassLayout(
            pages, [(row, past, past + 1) for row, past in new], self._rows, segments, CPU, expands=False
        )

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> HostLayerKV:
        k_NPHD, v_NPHD = self._pages.layer(index, key, value)
        return HostLayerKV(k_NPHD, v_NPHD, self._layout, index, key, value, self._exchange)

    def store_prompts(self, index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Begins to bring keys and values (1, H, T, D) of prompts to their pages."""
        pairs = zip(self._pages.layer(index, key, value), (key, value), strict=True)
        copies = [copy for pages, new in pairs for copy in self._new_token_copies(pages, new)]
        if copies:
            self._exchange.store(index, copies)

    def _new_token_copies(self, pages_NPHD: torch.Tensor, new_1HTD: torch.Tensor) -> Iterator[CopyPart]:
        if not self._segments:
            return
        flat, new_THD = pages_NPHD.flatten(0, 1), new_1HTD[0].transpose(0, 1).contiguous()
        for segment in self._segments:
            tokens = new_THD[segment.start : segment.start + segment.new]
            for place, at, num in self._layout.runs(segment.row, segment.past, segment.end):
                yield CopyPart(tokens[at : at + num], flat[place : place + num])

    def begin_attention(
        self,
        index: int,
        tokens_B: torch.Tensor,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        sinks_H: torch.Tensor | None,
    ) -> HostAttention:
        """Begins to bring down queries, keys and values (1, H, T, D) of the tokens that decode."""
        assert self._rows is not None, "no row decodes"
        sent = [t[0, :, tokens_B].transpose(0, 1).contiguous() for t in qkv]
        out = self._exchange.new_tensor((*sent[0].shape[:2], sent[2].shape[2]), sent[2].dtype)
        sinks = [] if sinks_H is None else [sinks_H.float().contiguous()]
        round_trip = self._exchange.send(index, [*sent, *sinks], out)
        return HostAttention(round_trip, self.layer(index, *qkv[1:]), self._rows, tokens_B, self._copies)
