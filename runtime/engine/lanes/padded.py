"""Padded lanes: left-padded rectangles of prompts, for which the model builds its own masks.

Used for classes that accept no other attention function, or that keep recurrent state, as only CUDA kernels know the
boundaries of packed sequences there. Classes that generate different tokens with padding get one rectangle per row.
"""

from abc import abstractmethod
from collections.abc import Sequence as Rows  # `Sequence` is a running request

import torch
from greenlet import GreenletExit
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache

from ...attention.upload import upload
from ...cache.pages import KVCache
from ...cache.rectangle import RectangleKV, rectangle_cache, skip_layers
from ...events import Event, LaneRun, NeedStage, need_stage, need_tensor
from ...plan.placement.memory import chunk_columns
from ...probing.padded_probe import PassInputs
from ...sequences.beam_search import split_searches
from ...sequences.reading import PoolingTargets
from ...sequences.sequence import Sequence
from ..records import PassCounts
from .lane import Lane, LaneContext


class RectangleLane(Lane):
    """Base of padded lanes. `kv`: the offloaded layers of `cache`. Rows of finished sequences leave the rectangle."""

    def __init__(
        self, context: LaneContext, sequences: Rows[Sequence], cache: Cache, kv: RectangleKV, *, padding_side: str
    ):
        super().__init__(context, sequences)
        self._padding_side = padding_side
        self._reset(cache, kv)

    def _reset(self, cache: Cache, kv: RectangleKV) -> None:
        """Starts with an empty cache. All known tokens of the sequences become the prompts."""
        self._cache, self._kv = cache, kv
        prompts = [torch.tensor(self._prompt(s), device=self._device) for s in self.sequences]
        masks = [torch.ones_like(prompt) for prompt in prompts]
        self._prompts_BS, self._mask_BS = (
            pad_sequence(rows, batch_first=True, padding_side=self._padding_side) for rows in (prompts, masks)
        )

    def _prompt(self, sequence: Sequence) -> Rows[int]:
        return sequence.known_ids

    @property
    def cache(self) -> Cache:
        return self._cache

    @property
    def kv(self) -> RectangleKV:
        return self._kv

    def close(self) -> None:
        self._kv.close()

    def marked_rows(self, marks: torch.Tensor) -> list[bool]:
        """Ignores padding."""
        if (sliced := self._marked_slice_rows(marks)) is not None:
            return sliced
        real = self._real_tokens(marks.shape[1])
        return (marks if real is None else marks & real.bool()).any(-1).tolist()

    @abstractmethod
    def _real_tokens(self, width: int) -> torch.Tensor | None:
        """The padding mask of a hidden state that is `width` tokens wide; None if it has no padding."""

    def _move_beams(self) -> None:
        """Moves keys and values of generated tokens to the beams that continue them."""
        if (sources := self._take_sources()) is not None:
            self._generated_cache.reorder_cache(upload(sources, self._device))  # pyright: ignore[reportArgumentType]

    @property
    def _generated_cache(self) -> Cache:
        """The cache of generated tokens."""
        return self._cache

    def _drop_finished_rows(self) -> None:
        unfinished = [row for row, s in enumerate(self.sequences) if s.finish is None]
        if unfinished and len(unfinished) < len(self.sequences):
            self._select_rows(upload(unfinished, self._device))
        self.sequences = [self.sequences[row] for row in unfinished]

    def _select_rows(self, rows_B: torch.Tensor) -> None:
        self._cache.reorder_cache(rows_B)  # pyright: ignore[reportArgumentType] - a legacy type, as in processors.py
        self._mask_BS = self._mask_BS[rows_B]


class PaddedLane(RectangleLane):
    """Left-padded lane, prefilled in chunks of columns. If one row must restart, the whole rectangle does: its memory
    was sized for prompts and generated tokens together."""

    def __init__(self, context: LaneContext, sequences: Rows[Sequence]):
        self._context = context
        super().__init__(context, sequences, *self._make_cache(sequences), padding_side="left")

    def _make_cache(self, sequences: Rows[Sequence]) -> tuple[Cache, RectangleKV]:
        """A cache for the maximum length of the sequences, and its offloaded layers."""
        context = self._context
        self._num_prompt = {s.request.key: s.num_known for s in sequences}  # including tokens generated before
        self._width = max(self._num_prompt.values())
        self._chunk_columns = self._width
        if not context.has_whole_prompts:
            self._chunk_columns = chunk_columns(len(sequences), self._width, context.prefill_chunk_tokens)
        self._num_cached = 0  # columns in the cache
        capacity = self._width + max(s.request.max_new_tokens - len(s.generated) for s in sequences)
        config, skipped = context.model.config, context.skipped_layers
        cache = rectangle_cache(config, capacity, context.device, context.offloaded_layers, skipped)
        return cache, RectangleKV(cache, len(sequences), capacity, context.pool)

    def _real_tokens(self, width: int) -> torch.Tensor | None:
        mask = self._mask_BS[:, self._num_cached : self._end]
        return mask[:, -width:] if width <= mask.shape[1] else None

    def _prepare(self) -> None:
        if self._num_cached >= self._width:
            self._ids_BT = upload([[s.generated[-1]] for s in self.sequences], self._device)
            self._mask_BS = torch.cat([self._mask_BS, torch.ones_like(self._ids_BT)], 1)
        else:
            self._ids_BT = self._prompts_BS[:, self._num_cached : self._num_cached + self._chunk_columns]
        self._end = self._num_cached + self._ids_BT.shape[1]
        self._positions_BT = (self._mask_BS.cumsum(-1) - 1).clamp(min=0)[:, self._num_cached : self._end]
        self._targets = None
        if self._reads_prompts:  # all prompts end in the last column
            parts = list[tuple[Sequence, int, list[tuple[int, ...]]]]()
            for row, s in enumerate(self.sequences, 1):
                num_pads = self._width - self._num_prompt[s.request.key]
                past, end = max(0, self._num_cached - num_pads), max(0, self._end - num_pads)
                parts.append((s, row * self._ids_BT.shape[1], s.target_tokens(past, end - past)))
            self._targets = self._make_targets(parts)

    def _lengths(self) -> torch.Tensor | None:
        if self._rope_lengths is None:
            return None
        columns = [(s, self._width - self._num_prompt[s.request.key]) for s in self.sequences]
        begin, end = self._num_cached, self._end
        return torch.tensor([self._lengths_of(s, range(begin - pads, end - pads)) for s, pads in columns])

    def _forward(self) -> None:
        inputs = PassInputs(
            ids_BT=self._ids_BT,
            positions_BT=self._positions_BT,
            mask_BS=self._mask_BS[:, : self._end],
            is_first=self._num_cached < self._width,
        )
        arguments = inputs.make_arguments(self._model, self._cache)
        if self._targets is not None and (self._targets.positions or isinstance(self._targets, PoolingTargets)):
            all_positions = {**arguments, "logits_to_keep": 0} if "logits_to_keep" in arguments else arguments
            self._read_targets(lambda: self._model(**all_positions))
            return
        self._logits_BV = self._model(**arguments).logits[:, -1]

    def _sampled_sequences(self) -> list[Sequence]:
        if self._targets is not None:
            return []
        return self.sequences if self._end >= self._width else []

    def _finish(self, drawn: torch.Tensor) -> PassCounts:
        skip_layers(self._cache, self._context.skipped_layers, *self._ids_BT.shape)
        num_real = 0
        is_prefill = self._num_cached < self._width
        for sequence in self.sequences:
            num_pads = self._width - self._num_prompt[sequence.request.key]
            num_real += max(0, self._end - max(self._num_cached, num_pads))
            sequence.num_cached = max(0, self._end - num_pads)
        self._num_cached = self._end
        sampled = self._sampled
        counts = PassCounts(
            num_sequences=len(self.sequences),
            real_tokens=num_real,
            padded_tokens=self._ids_BT.numel(),
            prompt_tokens=num_real if is_prefill else 0,
            issued_tokens=len(sampled),
            useful_tokens=self._accept(drawn),
        )
        self._move_beams()
        self._drop_finished_rows()
        if any(self._needs_restart(s) for s in sampled):
            self._kv.close()
            for sequence in self.sequences:
                sequence.num_cached = 0
            self._reset(*self._make_cache(self.sequences))
        return counts


class SeparateRowsLane(Lane):
    """Padded lane in which each row is a rectangle of its own, for classes that generate different tokens with padding.
    Beams of one request are equally long and share one. All rows run a stage while its weights are loaded, so the
    engine sees one lane. Rows of finished sequences leave."""

    def __init__(self, context: LaneContext, sequences: Rows[Sequence]):
        super().__init__(context, sequences)
        self._rows = [PaddedLane(context, beams) for beams in split_searches(sequences)]
        self._runs: list[LaneRun] = []
        self._current_row = 0  # index of the running row

    @property
    def cache(self) -> None:
        """Always None: each row has its own cache."""

    @property
    def kv(self) -> KVCache:
        return _JoinedKV([row.kv for row in self._rows])

    @property
    def is_prefilling(self) -> bool:
        return any(row.is_prefilling for row in self._rows)

    def close(self) -> None:
        for row in self._rows:
            row.close()

    def is_running(self, run: object) -> bool:
        return run in self._runs or super().is_running(run)

    def marked_rows(self, marks: torch.Tensor) -> list[bool]:
        """Marks belong to the row that is running."""
        return [
            row == self._current_row and bool(marks.any())
            for row, lane in enumerate(self._rows)
            for _ in lane.sequences
        ]

    def _prepare(self) -> None:
        for row in self._rows:
            row._prepare()

    def _forward(self) -> None:
        runs = self._runs = [row.make_run() for row in self._rows]
        try:
            events = [run.switch() for run in runs]
            while any(event is not None for event in events):
                for self._current_row, run in enumerate(runs):
                    events[self._current_row] = _run_stage(run, events[self._current_row])
        finally:
            for run in runs:
                run.throw(GreenletExit)  # a paused greenlet would keep its tensors alive
            self._runs = []

    def sample(self) -> torch.Tensor:
        return torch.cat([row.sample() for row in self._rows])

    def _sampled_sequences(self) -> list[Sequence]:
        """Empty: each row samples its own."""
        return []

    def _finish(self, drawn: torch.Tensor) -> PassCounts:
        parts = drawn.split([row.num_sampled for row in self._rows])
        counts = PassCounts.total([row.end_pass(part) for row, part in zip(self._rows, parts, strict=True)])
        for row in self._rows:
            if row.is_done:
                row.close()
        self._rows = [row for row in self._rows if not row.is_done]
        self.sequences = [sequence for row in self._rows for sequence in row.sequences]
        return counts


def _run_stage(run: LaneRun, event: Event | None) -> Event | None:
    """Runs a row until it needs the next stage, and returns that event; None when its forward pass has ended. Forwards
    other events to the engine."""
    assert isinstance(event, NeedStage), f"a row waits for {event!r} instead of a stage"
    stage = event.stage
    while event is not None and not (isinstance(event, NeedStage) and event.stage != stage):
        answer = need_stage(stage) if isinstance(event, NeedStage) else need_tensor(event)
        event = run.switch(answer)
        if run.dead:
            return None
    return event


class _JoinedKV(KVCache):
    def __init__(self, parts: Rows[KVCache]):
        self._parts = parts

    @property
    def pages(self) -> list[int]:
        return [page for part in self._parts for page in part.pages]

    @property
    def dirty_pages(self) -> range:
        return range(len(self.pages))

    def bind(self, layer: int, pages: torch.Tensor) -> None:
        for part, part_pages in zip(self._parts, pages.split([len(part.pages) for part in self._parts]), strict=True):
            part.bind(layer, part_pages)

    def unbind(self, layer: int) -> None:
        for part in self._parts:
            part.unbind(layer)

    def close(self) -> None:
        for part in self._parts:
            part.close()
