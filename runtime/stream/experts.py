"""Streams the experts of paged stages one by one, with a `WeightStream` in which each expert is a stage.

A paged stage is a layer whose experts are read one by one instead of with the layer. Its experts are pages, numbered
over all paged stages (`ExpertPages`). A staging slot is host memory between disk and device; a page is read to a
staging slot, then copied to a device slot.

A **kept** page stays in its slot in compute memory. The stream counts which pages decode passes hit, and keeps those
that save most reads, as many as the placement has slots for.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import TracebackType
from typing import TypeAlias

import numpy as np
import torch

from ..config.settings import ExpertPaging
from ..plan.placement.experts import ExpertPages, Routing
from ..plan.placement.placement import Placement
from ..plan.shape.extents import slot_layout
from ..plan.shape.model import ModelShape
from ..plan.shape.shapes import Stage
from ..store.reader import Reader
from ..trace import Trace
from ..units import format_bytes
from .clock import StreamCounters
from .device import ComputeDevice
from .weight_cache import StageBytes, StreamWeights
from .weights import WeightStream

# Returns a stage's weights by name, as views into a buffer with tensors at the given offsets.
StageViews: TypeAlias = Callable[[Stage, torch.Tensor, Mapping[str, int]], Mapping[str, torch.Tensor]]
MIN_SLOTS = 2  # one expert is computed while the next one arrives
COUNTED_PASSES = 8  # decode passes of a block after which the kept experts are chosen
MAX_COUNTED_PASSES = 256  # continuous admission has one block: after as many passes, counting begins again
NOTABLE = 0.02  # minimum saving of another choice of kept experts, as a share of the bytes of all hit experts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpertBytes:
    """The weights of one expert, valid until the stream yields the next expert."""

    expert: int  # index in its layer
    stage: Stage  # the expert's parameters, as stacks of one expert
    stage_bytes: StageBytes

    def matrices(self, weights_of: StageViews, prefix: str) -> dict[str, torch.Tensor]:
        """Returns the expert's matrices by name, without `prefix`."""
        weights = weights_of(self.stage, self.stage_bytes.buffer, self.stage_bytes.tensor_offsets)
        return {name.removeprefix(prefix): weight[0] for name, weight in weights.items()}


class ExpertStream:
    """Stream of experts; one per run. Not thread-safe: only the engine calls it. With paging `hit` it reads only
    experts that have tokens; with `all` it reads every expert, so that reads can start before the routing is known."""

    def __init__(
        self,
        shape: ModelShape,
        placement: Placement,
        device: ComputeDevice,
        reader: Reader,
        *,
        paging: ExpertPaging,
        num_slots: int = MIN_SLOTS,
        trace: Trace | None = None,
        loaded: StreamWeights | None = None,
    ):
        """`loaded`: see `WeightStream`."""
        assert num_slots >= MIN_SLOTS, f"{num_slots} expert slots cannot be computed and filled at the same time"
        assert paging in (ExpertPaging.hit, ExpertPaging.all), f"no experts are paged with {paging}"
        self._shape, self._paging = shape, paging
        self._pages = ExpertPages.from_shape(shape, placement.paged)
        self.slot_bytes = max(slot_layout(page).num_bytes for page in self._pages.pages)
        # Order and number of slots of the pages.
        walk = self._pages.walk(placement.walk, num_slots + placement.num_kept_experts)
        self._walk, self._num_slots, self._num_ahead = walk, num_slots, num_slots + walk.num_staging_slots
        self._started: deque[int] = deque()  # pages in flight, in order
        self._num_copied = 0  # the first pages of `_started`, whose copy from staging to device slots was queued
        expert_placement = Placement(
            resident=frozenset(),
            walk=walk,
            decode_walk=walk,
            slot_bytes=self.slot_bytes,
            ledgers=(),
            kv=placement.kv,
            exchange=placement.exchange,
        )
        expert_shape = self._pages.as_shape(shape)
        self._stream = WeightStream(expert_shape, expert_placement, device, reader, trace, self._pages.name, loaded)
        self._kept, self._max_kept = set[int](), placement.num_kept_experts
        # Pages to keep. None: no choice yet, as many of each stage as are read first.
        self._chosen: frozenset[int] | None = None
        self._num_first = Counter[int]()  # kept pages before the choice, by stage
        # Hits and runs of decode passes, by page; those of the current pass; and how much is counted.
        self._hits, self._runs = np.zeros(len(self._pages.pages)), np.zeros(len(self._pages.pages))
        self._pass_hits, self._pass_runs = Counter[int](), Counter[int]()
        self._num_tokens, self._num_runs, self._num_passes, self._block = 0.0, 0.0, 0, 0
        # For `take_counters`: since its last call.
        self._requested_stages: set[int] = set()
        self._hit_pages: set[int] = set()
        self._num_read = 0

    def __enter__(self) -> "ExpertStream":
        self._stream.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.__exit__(kind, value, traceback)

    def prefetch(self, stage: int) -> None:
        """Starts reading as many experts of a paged stage as there are slots, and drops reads of other stages. Does
        nothing with paging `hit`, since the routing is not known yet."""
        if self._paging is ExpertPaging.all:
            missing = [page for page in self._all_pages(stage) if page not in self._kept]
            self._start(missing[: self._num_ahead])

    def kept(self, stage: int, hit: Sequence[int]) -> list[int]:
        """Returns those of the experts `hit` of a paged stage that are in memory, if `experts` may yield them first.
        They stay there until the stage has run."""
        is_kept = self._kept if self._paging is ExpertPaging.hit else ()
        return [expert for expert in hit if self._pages.page(stage, expert) in is_kept]

    @property
    def group_size(self) -> int:
        """Most experts in a group of `groups` that are read, while as many others are in flight."""
        return 1 if self._is_staged or self._paging is ExpertPaging.all else self._num_slots // 2

    def experts(self, stage: int, hit: Sequence[int]) -> Generator[ExpertBytes]:
        """Yields the experts `hit` of a paged stage in this order (with paging `all` they must be ascending), while the
        next experts are read. Raises CheckpointError."""
        for [expert] in self.groups(stage, [[expert] for expert in hit]):
            yield expert

    def groups(self, stage: int, groups: Sequence[Sequence[int]]) -> Generator[list[ExpertBytes]]:
        """Same as `experts` for experts that are used together: yields all of a group at once. Groups may have
        `group_size` experts, and any number of those in `kept`."""
        experts = {self._pages.page(stage, expert): expert for group in groups for expert in group}
        pages = [[self._pages.page(stage, expert) for expert in group] for group in groups]
        if self._paging is ExpertPaging.all:
            pages = [[page] for page in self._all_pages(stage)]
        self._requested_stages.add(stage)
        self._hit_pages.update(experts)
        self._pass_hits.update(experts.keys())
        self._pass_runs[stage] += 1
        missing = deque(page for group in pages for page in group if page not in self._kept)
        self._num_read += len(missing)
        for group in pages:
            self._start(list(islice(missing, self._num_ahead)))
            used = [page for page in group if page not in self._kept]
            for _ in used:
                missing.popleft()
                self._started.popleft()
                self._num_copied -= self._is_staged
            try:
                hit = [page for page in group if page in experts]
                if hit:
                    yield [
                        ExpertBytes(experts[page], self._pages.pages[page], self._stream.acquire(page)) for page in hit
                    ]
                    used = [page for page in used if page not in experts or not self._keep(page, experts)]
            finally:
                for page in used:
                    self._stream.free(page)

    def host_expert(self, stage: int, expert: int) -> ExpertBytes:
        """Returns the weights of an expert that stays in host memory, for computing it on the CPU."""
        page = self._pages.page(stage, expert)
        self._requested_stages.add(stage)
        self._hit_pages.add(page)
        return ExpertBytes(expert, self._pages.pages[page], self._stream.host_stage(page))

    def end_pass(self, block: int, num_tokens: int, *, is_counted: bool) -> None:
        """Ends a pass of `num_tokens` and counts its hits, if `is_counted`. Chooses the kept experts once per block."""
        hits, runs = self._pass_hits, self._pass_runs
        self._pass_hits, self._pass_runs = Counter[int](), Counter[int]()
        if not is_counted or not runs:
            return
        if block != self._block or self._num_passes == MAX_COUNTED_PASSES:
            self._block, self._num_passes = block, 0
            self._hits /= 2  # of other rows: they count, but less
            self._runs /= 2
        for page, count in hits.items():
            self._hits[page] += count
        for stage, count in runs.items():
            pages = self._all_pages(stage)
            self._runs[pages.start : pages.stop] += count
        self._num_tokens += num_tokens
        self._num_runs += max(runs.values())
        self._num_passes += 1
        if self._num_passes == COUNTED_PASSES and self._max_kept:
            self._choose()

    @property
    def routing(self) -> Routing | None:
        """How often experts are hit, as counted so far; None if a stage has not run in a decode pass."""
        if not self._num_runs:
            return None
        return Routing.from_counts(self._hits.tolist(), self._runs.tolist(), self._num_tokens / self._num_runs)

    def take_counters(self) -> StreamCounters:
        """Returns the counters since the last call. Seconds are by the experts' stages."""
        counters = replace(
            self._stream.take_counters(),
            num_experts=sum(self._shape.stages[stage].num_experts for stage in self._requested_stages),
            num_experts_hit=len(self._hit_pages),
            num_experts_read=self._num_read,
        )
        self._requested_stages, self._hit_pages, self._num_read = set(), set(), 0
        return counters

    def _start(self, pages: Sequence[int]) -> None:
        """Starts reading these pages, as far as there are slots. If pages in flight are not the first ones of `pages`,
        drops all pages in flight. No page may be in use."""
        if list(self._started) != list(pages[: len(self._started)]):
            self._stream.drop(self._kept)
            self._started.clear()
            self._num_copied = 0
        waiting = deque(pages[len(self._started) :])
        # Copy the next page while a device slot is free, which frees its staging slot; otherwise read another page.
        while True:
            if self._is_staged and self._num_copied < min(len(self._started), self._num_slots):
                self._stream.copy(self._started[self._num_copied])
                self._num_copied += 1
            elif waiting and len(self._started) - self._num_copied < (self._walk.num_staging_slots or len(pages)):
                self._started.append(page := waiting.popleft())
                if page not in self._walk.in_host:
                    self._stream.read(page)
                elif not self._is_staged:
                    self._stream.copy(page)
            else:
                return

    def _keep(self, page: int, used: Collection[int]) -> bool:
        """Keeps a page that compute has used, if it is to be kept, in place of one that is not. Returns True if so.
        Pages in `used` stay, since compute may need them next."""
        if self._chosen is None:
            stage = self._pages.pages[page].index
            if self._num_first[stage] * len(self._pages.first_page) >= self._max_kept:
                return False
            self._num_first[stage] += 1
        elif page not in self._chosen:
            return False
        if len(self._kept) == self._max_kept:
            others = self._kept - self._chosen if self._chosen is not None else ()
            dropped = next((other for other in others if other not in used), None)
            if dropped is None:
                return False
            self._kept.remove(dropped)
            self._stream.free(dropped)
        self._kept.add(page)
        return True

    def _choose(self) -> None:
        """Chooses the pages to keep: those with most expected bytes, as many as there are slots. Prefers pages that are
        kept already, and changes nothing if that saves hardly any bytes."""
        routing = self.routing
        if routing is None:
            return
        num_bytes = np.array([slot_layout(page).num_bytes for page in self._pages.pages])
        saved = np.asarray(routing.hit_rates) * num_bytes  # per run
        is_kept = np.zeros(len(saved), bool)
        is_kept[list(self._chosen or self._kept)] = True
        order = np.lexsort((-self._hits, ~is_kept, -saved))[: self._max_kept]
        if saved[order].sum() - saved[is_kept].sum() < NOTABLE * saved.sum():
            return
        self._chosen = frozenset(order.tolist())
        log.info(
            "experts: %d of %d stay in memory (%s), which had %.0f %% of the hits in %d passes",
            len(order),
            len(saved),
            format_bytes(len(order) * self.slot_bytes),
            100 * self._hits[order].sum() / self._hits.sum(),
            self._num_passes,
        )

    @property
    def _is_staged(self) -> bool:
        return self._walk.num_staging_slots > 0

    def _all_pages(self, stage: int) -> range:
        """Returns the pages of all experts of a stage."""
        first = self._pages.first_page[stage]
        return range(first, first + self._shape.stages[stage].num_experts)
