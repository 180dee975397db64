"""A stream of keys and values, and a model of what it should hold: for the tests of its bytes and of its races."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from runtime.config.settings import KVTier
from runtime.plan.placement.kv import KVLayout
from runtime.store.kv_file import KVFile
from runtime.stream.device import ComputeDevice
from runtime.stream.kv import KVStream
from runtime.trace import Trace
from tests.fake_device import FakeDevice

NUM_PAGES, SLOT_PAGES = 24, 8
PAGE_BYTES = {0: 4096, 2: 5000}
LAYERS = tuple(PAGE_BYTES)
TIERS = [KVTier.cpu, KVTier.nvme]


@contextmanager
def opened(
    tier: KVTier, device: ComputeDevice, directory: Path, *, num_slots: int = 3, trace: Trace | None = None
) -> Iterator[KVStream]:
    layout = KVLayout(tier=tier, page_bytes=PAGE_BYTES, num_pages=NUM_PAGES, slot_pages=SLOT_PAGES, num_slots=num_slots)
    if tier is KVTier.cpu:
        with KVStream(layout, device, trace=trace) as stream:
            yield stream
    else:
        with KVFile(layout, directory=str(directory)) as file, KVStream(layout, device, file, trace=trace) as stream:
            yield stream


class Model:
    """What the tier should hold, and the compute that reads and writes it: queued where the device defers compute."""

    def __init__(self, device: ComputeDevice, stream: KVStream):
        self._device, self._stream = device, stream
        self.truth = {(layer, page): 0 for layer in LAYERS for page in range(NUM_PAGES)}
        self.problems: list[str] = []

    def compute(self, layer: int, lane: int, pages: list[int], changed: list[int], value: int) -> None:
        """Checks all pages and writes `value` into some, as one piece of work; then stores those."""
        held = self._stream.acquire(layer, lane)
        assert held.shape == (len(pages), PAGE_BYTES[layer])
        expected = [self.truth[layer, page] for page in pages]
        if isinstance(self._device, FakeDevice):
            self._device.compute(lambda: self._work(layer, pages, held, expected, changed, value))
        else:
            self._work(layer, pages, held, expected, changed, value)
        self.truth |= {(layer, pages[place]): value for place in changed}
        self._stream.store(layer, lane, changed)

    def _work(
        self, layer: int, pages: list[int], held: torch.Tensor, expected: list[int], changed: list[int], value: int
    ) -> None:
        for page, row, wanted in zip(pages, held, expected, strict=True):
            if not bool((row == wanted).all()):
                self.problems.append(f"layer {layer} page {page}: {row.unique().tolist()} instead of {wanted}")
        for place in changed:
            held[place] = value


def play(
    device: ComputeDevice, stream: KVStream, num_turns: int = 30, num_ahead: int = 1, *, in_runs: bool = False
) -> list[str]:
    """Lanes with pages of their own, layer by layer, each fetched `num_ahead` turns before it computes. Sequences
    grow, pages are given back and taken again. `in_runs`: a lane's pages are neighbours, in order, of which several may
    be copied at once; otherwise none is another's. Returns what was wrong."""
    generator = torch.Generator().manual_seed(num_ahead)
    each = NUM_PAGES // 3
    lanes = [list(range(n * each, (n + 1) * each) if in_runs else range(n, NUM_PAGES, 3)) for n in range(3)]
    model = Model(device, stream)
    turns = [(LAYERS[turn // 3 % 2], turn % 3) for turn in range(num_turns)]
    fetched: dict[int, list[int]] = {}
    for turn, (layer, lane) in enumerate(turns):
        for ahead in range(turn, min(turn + num_ahead + 1, num_turns)):
            if ahead not in fetched:
                pages = lanes[turns[ahead][1]]
                order = range(each) if in_runs else torch.randperm(each, generator=generator).tolist()
                fetched[ahead] = [pages[place] for place in order][: 3 + ahead % 6]
                stream.fetch(*turns[ahead], fetched[ahead])
        pages = fetched[turn]
        changed = [place for place in range(len(pages)) if (turn + place) % 3] if turn % 4 else []
        model.compute(layer, lane, pages, changed, 1 + turn % 200)
    device.wait_for_compute()
    return model.problems
