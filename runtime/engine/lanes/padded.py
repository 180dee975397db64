"""Lanes with padding: a rectangle of prompts, left-padded, for which the model keeps its own masks.

For classes that will not take a foreign attention function, or that keep recurrent state, whose boundaries no class
but a CUDA kernel's knows in a packed row. Classes that give a row other tokens beside padding get each row as a
rectangle by itself.
"""

from abc import abstractmethod
from collections.abc import Sequence as Rows

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
    """`kv`: the layers of `cache` that travel. Rows of finished sequences leave the rectangle."""

    def __init__(
        self, context: LaneContext, sequences: Rows[Sequence], cache: Cache, kv: RectangleKV, *, padding_side: str
    ):
        super().__init__(context, sequences)
        self._padding_side = padding_side
        self._reset(cache, kv)

    def _reset(self, cache: Cache, kv: RectangleKV) -> None:
        """Begins with all that is known of the sequences, of which an empty cache holds nothing yet."""
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
        """Padding may be whatever it is."""
        if (sliced := self._marked_slice_rows(marks)) is not None:
            return sliced
        real = self._real_tokens(marks.shape[1])
        return (marks if real is None else marks & real.bool()).any(-1).tolist()

    @abstractmethod
    def _real_tokens(self, width: int) -> torch.Tensor | None:
        """The mask of a hidden state of the pass that is `width` tokens wide; None: all are real."""

    def _move_beams(self) -> None:
        """What each row has cached becomes that of the beam which it goes on from. Nothing else of a row differs from
        that of its neighbours: their prompts are the same."""
        if (sources := self._take_sources()) is not None:
            self._generated_cache.reorder_cache(upload(sources, self._device))  # pyright: ignore[reportArgumentType]

    @property
    def _generated_cache(self) -> Cache:
        """What is cached of the tokens that a model has generated behind."""
        return self._cache

    def _drop_finished_rows(self) -> None:
        kept = [row for row, s in enumerate(self.sequences) if s.finish is None]
        if kept and len(kept) < len(self.sequences):
            self._select_rows(upload(kept, self._device))
        self.sequences = [self.sequences[row] for row in kept]

    def _select_rows(self, rows_B: torch.Tensor) -> None:
        self._cache.reorder_cache(rows_B)  # pyright: ignore[reportArgumentType] - a legacy type, as in processors.py
        self._mask_BS = self._mask_BS[rows_B]


class PaddedLane(RectangleLane):
    """Prefilled in chunks of columns. Where one row begins again the whole rectangle does, in the memory that it had:
    what others have generated is as wide as their answers were planned."""

    def __init__(self, context: LaneContext, sequences: Rows[Sequence]):
        self._context = context
        super().__init__(context, sequences, *self._make_cache(sequences), padding_side="left")

    def _make_cache(self, sequences: Rows[Sequence]) -> tuple[Cache, RectangleKV]:
        """A cache for all that the sequences may come to, and its travelling layers."""
        context = self._context
        self._num_prompt = {s.request.key: s.num_known for s in sequences}  # with what was generated earlier
        self._width = max(self._num_prompt.values())
        self._columns = self._width
        if not context.has_whole_prompts:
            self._columns = chunk_columns(len(sequences), self._width, context.prefill_chunk_tokens)
        self._done = 0  # columns that the cache holds
        capacity = self._width + max(s.request.max_new_tokens - len(s.generated) for s in sequences)
        config, passed = context.model.config, context.skipped_layers
        cache = rectangle_cache(config, capacity, context.device, context.offloaded_layers, passed)
        return cache, RectangleKV(cache, len(sequences), capacity, context.pool)

    def _real_tokens(self, width: int) -> torch.Tensor | None:
        mask = self._mask_BS[:, self._done : self._end]
        return mask[:, -width:] if width <= mask.shape[1] else None

    def _prepare(self) -> None:
        if self._done >= self._width:
            self._ids_BT = upload([[s.generated[-1]] for s in self.sequences], self._device)
            self._mask_BS = torch.cat([self._mask_BS, torch.ones_like(self._ids_BT)], 1)
        else:
            self._ids_BT = self._prompts_BS[:, self._done : self._done + self._columns]
        self._end = self._done + self._ids_BT.shape[1]
        self._positions_BT = (self._mask_BS.cumsum(-1) - 1).clamp(min=0)[:, self._done : self._end]
        self._targets = None
        if self._reads_prompts:  # all prompts end in the last column
            parts = list[tuple[Sequence, int, list[tuple[int, ...]]]]()
            for row, s in enumerate(self.sequences, 1):
                num_pads = self._width - self._num_prompt[s.request.key]
                past, end = max(0, self._done - num_pads), max(0, self._end - num_pads)
                parts.append((s, row * self._ids_BT.shape[1], s.target_tokens(past, end - past)))
            self._targets = self._make_targets(parts)

    def _lengths(self) -> torch.Tensor | None:
        if self._rope_lengths is None:
            return None
        columns = [(s, self._width - self._num_prompt[s.request.key]) for s in self.sequences]
        return torch.tensor([self._lengths_of(s, range(self._done - pads, self._end - pads)) for s, pads in columns])

    def _forward(self) -> None:
        inputs = PassInputs(
            ids_BT=self._ids_BT,
            positions_BT=self._positions_BT,
            mask_BS=self._mask_BS[:, : self._end],
            is_first=self._done < self._width,
        )
        arguments = inputs.of(self._model, self._cache)
        if self._targets is not None and (self._targets.places or isinstance(self._targets, PoolingTargets)):
            every = {**arguments, "logits_to_keep": 0} if "logits_to_keep" in arguments else arguments
            self._read_targets(lambda: self._model(**every))
            return
        self._logits_BV = self._model(**arguments).logits[:, -1]

    def _sampled_sequences(self) -> list[Sequence]:
        if self._targets is not None:
            return []
        return self.sequences if self._end >= self._width else []

    def _finish(self, drawn: torch.Tensor) -> PassCounts:
        skip_layers(self._cache, self._context.skipped_layers, *self._ids_BT.shape)
        real = 0
        is_prefill = self._done < self._width
        for sequence in self.sequences:
            num_pads = self._width - self._num_prompt[sequence.request.key]
            real += max(0, self._end - max(self._done, num_pads))
            sequence.num_cached = max(0, self._end - num_pads)
        self._done = self._end
        sampled = self._drawing
        counts = PassCounts(
            num_sequences=len(self.sequences),
            real_tokens=real,
            padded_tokens=self._ids_BT.numel(),
            prompt_tokens=real if is_prefill else 0,
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
    """A padded lane of which each row is a rectangle by itself: for classes that give a row other tokens beside
    padding. Beams of one request are equally long and share one, which has none. All rows pass a stage while its
    weights are there, one behind the other; to the engine they are one lane. Rows of finished sequences leave it."""

    def __init__(self, context: LaneContext, sequences: Rows[Sequence]):
        super().__init__(context, sequences)
        self._rows = [PaddedLane(context, beams) for beams in split_searches(sequences)]
        self._runs: list[LaneRun] = []
        self._current_row = 0  # the row that runs

    @property
    def cache(self) -> None:
        """Each row has its own."""

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
        """The tokens are those of the row that runs."""
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
                run.throw(GreenletExit)
            self._runs = []

    def sample(self) -> torch.Tensor:
        return torch.cat([row.sample() for row in self._rows])

    def _sampled_sequences(self) -> list[Sequence]:
        """Each row draws by itself."""
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
    """Asks for a row what it asks for, until it wants the next stage; None when its forward has ended."""
    assert isinstance(event, NeedStage), f"a row waits for {event!r} before a stage"
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
        for part, own in zip(self._parts, pages.split([len(part.pages) for part in self._parts]), strict=True):
            part.bind(layer, own)

    def unbind(self, layer: int) -> None:
        for part in self._parts:
            part.unbind(layer)

    def close(self) -> None:
        for part in self._parts:
            part.close()
