"""Stages arrive with the file's bytes, and a slot is not handed to a new read before it is freed."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.config.settings import OffloadConfig, Order, PolicyConfig, PrefetchConfig, RuntimeConfig, Tier
from runtime.errors import CheckpointError
from runtime.plan.placement.load import Load
from runtime.plan.placement.memory import SequenceSize
from runtime.plan.placement.placement import Budgets, Placement
from runtime.plan.placement.placer import choose_placement
from runtime.plan.shape.extents import Extent
from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.shapes import Parameter, Stage, StageKind, TensorSlice
from runtime.resources import Resource
from runtime.store.header import read_header
from runtime.store.reader import Reader
from runtime.store.transfer import ChunkTiming, PendingTransfer
from runtime.stream.device import ComputeDevice
from runtime.stream.weights import WeightStream
from runtime.trace import Trace
from runtime.units import GIB
from tests.fake_device import FakeDevice
from tests.toy import toy_shape

NUM_LAYERS = 4
DEVICE = ComputeDevice("cpu")


def stage_of(index: int, pieces: Sequence[TensorSlice]) -> Stage:
    kind = {0: StageKind.embedding, NUM_LAYERS + 1: StageKind.head}.get(index, StageKind.layer)
    parameters = tuple(Parameter(name=p.name, shape=p.shape, pieces=((p,),)) for p in pieces)
    return Stage(index=index, name=str(index), kind=kind, parameters=parameters)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"w{index}": torch.rand(64 + index, 32, generator=generator) for index in range(NUM_LAYERS + 1)}


@pytest.fixture
def shape(tensors: dict[str, torch.Tensor], tmp_path: Path) -> ModelShape:
    """Stage i holds w{i}; the head is tied to the embeddings."""
    save_file(tensors, tmp_path / "model")
    found = read_header(tmp_path / "model")
    names = [f"w{index}" for index in range(NUM_LAYERS + 1)] + ["w0"]
    toy = toy_shape(NUM_LAYERS)
    stages = tuple(stage_of(index, [found[name]]) for index, name in enumerate(names))
    fields = {name: getattr(toy, name) for name in toy.__dataclass_fields__ if name not in ("stages", "weight_bytes")}
    return ModelShape(stages=stages, **fields)


def placement_of(
    shape: ModelShape,
    resident_layers: int = 1,
    depth: int = 1,
    *,
    order: Order = Order.zigzag,
    num_lanes: int = 0,
    device: ComputeDevice = DEVICE,
) -> Placement:
    offload = OffloadConfig(tier=Tier.nvme, resident_layers=resident_layers)
    config = RuntimeConfig(offload=offload, prefetch=PrefetchConfig(depth=depth), policy=PolicyConfig(schedule=order))
    budgets = Budgets(host_bytes=GIB, device_bytes=GIB if device.is_accelerator else None)
    lanes = [[SequenceSize(num_prompt_tokens=1, max_new_tokens=1)]] * num_lanes
    return choose_placement(shape, config, budgets, Load.from_lanes(shape, lanes, 512))


class CountingReader(Reader):
    def __init__(self) -> None:
        super().__init__(num_threads=2)
        self.targets: list[int] = []
        self._may_read = threading.Event()
        self.go_on()

    def submit(self, extents: Sequence[Extent], target: memoryview) -> PendingTransfer:
        self.targets.append(torch.frombuffer(target, dtype=torch.uint8).data_ptr())
        return super().submit(extents, target)

    def hold(self) -> None:
        """Its threads read nothing until `go_on`."""
        self._may_read.clear()

    def go_on(self) -> None:
        self._may_read.set()

    def _read(self, path: str, offset: int, view: memoryview, needed: int) -> ChunkTiming:
        self._may_read.wait()
        return super()._read(path, offset, view, needed)


@pytest.fixture
def reader() -> Iterator[CountingReader]:
    with CountingReader() as reader:
        yield reader


def weight(stream: WeightStream, stage: int, name: str, like: torch.Tensor) -> torch.Tensor:
    placed = stream.acquire(stage)
    begin = placed.tensor_offsets[name]
    return placed.buffer[begin : begin + like.nbytes].view(like.dtype).view(like.shape)


def test_every_stage_has_the_files_bytes_pass_after_pass(
    shape: ModelShape, tensors: dict[str, torch.Tensor], reader: CountingReader
) -> None:
    placement = placement_of(shape)
    with WeightStream(shape, placement, DEVICE, reader) as stream:
        for _ in range(3):
            for stage in placement.walk.streamed:
                stream.read(stage)
                assert torch.equal(weight(stream, stage, f"w{stage}", tensors[f"w{stage}"]), tensors[f"w{stage}"])
                stream.free(stage)
        for stage in placement.resident:
            name = f"w{stage % (NUM_LAYERS + 1)}"
            assert torch.equal(weight(stream, stage, name, tensors[name]), tensors[name])


def test_tied_resident_stages_share_one_buffer_that_is_read_once(shape: ModelShape, reader: CountingReader) -> None:
    with WeightStream(shape, placement_of(shape, resident_layers=0), DEVICE, reader) as stream:
        assert stream.acquire(0).buffer.data_ptr() == stream.acquire(NUM_LAYERS + 1).buffer.data_ptr()
        assert len(reader.targets) == 1


def test_an_accelerators_resident_stages_come_through_a_little_pinned_memory(
    shape: ModelShape, tensors: dict[str, torch.Tensor], reader: CountingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.stream.weights.LOADING_BYTES", 4096)
    placement = placement_of(shape, resident_layers=4)
    assert max(shape.sizes.whole_bytes) > 4096
    with WeightStream(shape, placement, FakeDevice(), reader) as stream:
        assert len({*reader.targets}) == 1
        for stage in placement.resident:
            name = f"w{stage % (NUM_LAYERS + 1)}"
            assert torch.equal(weight(stream, stage, name, tensors[name]), tensors[name])


def test_a_slot_is_not_handed_to_a_new_read_before_it_is_freed(shape: ModelShape, reader: CountingReader) -> None:
    placement = placement_of(shape, resident_layers=0, depth=1)
    first, second, third = placement.walk.streamed[:3]
    with WeightStream(shape, placement, DEVICE, reader) as stream:
        reader.targets.clear()
        stream.read(first)
        stream.read(second)
        assert len(set(reader.targets)) == 2
        with pytest.raises(IndexError):  # both slots are taken; a checked schedule never asks
            stream.read(third)
        stream.free(second)
        stream.read(third)
        assert reader.targets[2] == reader.targets[1]
        assert stream.acquire(first).key != stream.acquire(third).key


def test_a_stage_freed_without_use_is_waited_for_first(shape: ModelShape, reader: CountingReader) -> None:
    """Otherwise the next read of the slot and this one would write into it at the same time."""
    placement = placement_of(shape, resident_layers=0, depth=1)
    stage = placement.walk.streamed[0]
    with WeightStream(shape, placement, DEVICE, reader) as stream:
        stream.read(stage)
        pending = stream._used_slots[stage].reads.get(0)
        stream.free(stage)
        assert pending is not None
        assert pending.is_done


def test_what_is_dropped_is_waited_for_and_leaves_its_slots_free(shape: ModelShape, reader: CountingReader) -> None:
    placement = placement_of(shape, resident_layers=0, depth=1)
    first, second, third = placement.walk.streamed[:3]
    with WeightStream(shape, placement, DEVICE, reader) as stream:
        stream.read(first)
        stream.read(second)
        pending = [stream._used_slots[stage].reads.get(0) for stage in (first, second)]
        stream.drop()
        assert all(read is not None and read.is_done for read in pending)
        stream.read(third)
        stream.read(first)


@pytest.mark.parametrize("num_lanes", [1, 3], ids=["whole", "by page"])
@pytest.mark.parametrize("device", [DEVICE, FakeDevice()], ids=["memory", "accelerator"])
def test_a_barrier_waits_for_reads_and_leaves_them_to_be_taken(
    device: ComputeDevice,
    num_lanes: int,
    shape: ModelShape,
    tensors: dict[str, torch.Tensor],
    reader: CountingReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runtime.stream.weights.IN_TIME_SECONDS", 60.0)  # a busy host may stop between two events
    placement = placement_of(shape, resident_layers=0, order=Order.flexgen, num_lanes=num_lanes, device=device)
    stage, walk = placement.walk.streamed[0], placement.walk
    pages = range(walk.num_pages) if walk.num_pages > 1 else [None]
    with WeightStream(shape, placement, device, reader) as stream:
        for page in pages:
            stream.read(stage, page)
            pending = [read for _, _, read in stream._pending_reads()]
            stream.sync()
            assert pending
            assert all(read.is_done for read in pending)
        for page in pages if walk.copies else ():
            stream.copy(stage, page)
            stream.sync()
        assert torch.equal(weight(stream, stage, f"w{stage}", tensors[f"w{stage}"]), tensors[f"w{stage}"])
        stream.free(stage)
        device.synchronize()
        counters = stream.take_counters()
    assert shape.stages[stage].num_bytes <= counters.bytes_read <= walk.num_pages * placement.slot_bytes
    assert (counters.num_hits, counters.num_misses) == (1, 0)


def test_counters_count_each_read_once_and_start_again(shape: ModelShape, reader: CountingReader) -> None:
    placement = placement_of(shape, resident_layers=0)
    stage = placement.walk.streamed[0]
    with WeightStream(shape, placement, DEVICE, reader) as stream:
        assert stream.take_counters().bytes_read == 0
        stream.read(stage)
        for _ in range(3):
            stream.acquire(stage)
        stream.free(stage)
        counters = stream.take_counters()
        assert shape.stages[stage].num_bytes <= counters.bytes_read <= placement.slot_bytes
        assert set(counters.reads) == set(counters.stalls) == {stage}
        assert counters.reads[stage] > 0
        assert counters.bytes_copied == 0
        assert stream.take_counters().bytes_read == 0


def test_a_stage_is_a_hit_when_its_bytes_are_there_as_the_first_lane_asks(
    shape: ModelShape, reader: CountingReader
) -> None:
    placement = placement_of(shape, resident_layers=0, depth=1)
    early, late = placement.walk.streamed[:2]
    with WeightStream(shape, placement, DEVICE, reader) as stream:
        stream.read(early)
        pending = stream._used_slots[early].reads.get(0)
        assert pending is not None
        pending.wait()
        stream.acquire(early)
        reader.hold()
        stream.read(late)
        threading.Timer(0.02, reader.go_on).start()
        for _ in range(2):  # of two lanes only the first counts
            stream.acquire(late)
        stream.acquire(0)  # resident stages are neither
        counters = stream.take_counters()
    assert (counters.num_hits, counters.num_misses) == (1, 1)
    assert counters.stalls[late] > counters.stalls[early]


def test_a_stage_of_which_a_page_is_missing_is_no_hit(shape: ModelShape, reader: CountingReader) -> None:
    placement = placement_of(shape, resident_layers=0, order=Order.flexgen, num_lanes=2)
    stage = placement.walk.streamed[0]
    with WeightStream(shape, placement, DEVICE, reader) as stream:
        stream.read(stage, 0)
        stream._used_slots[stage].reads[0].wait()
        reader.hold()
        stream.read(stage, 1)
        threading.Timer(0.02, reader.go_on).start()
        stream.acquire(stage)
        counters = stream.take_counters()
    assert (counters.num_hits, counters.num_misses) == (0, 1)


def test_each_read_is_a_span_of_the_seconds_that_are_counted(shape: ModelShape, reader: CountingReader) -> None:
    placement, trace, begin = placement_of(shape, resident_layers=0), Trace(), time.monotonic()
    with WeightStream(shape, placement, DEVICE, reader, trace) as stream:
        for stage in placement.walk.streamed:
            stream.read(stage)
            stream.acquire(stage)
            stream.free(stage)
        counters = stream.take_counters()
    spans = {span.name: span for span in trace.take()}
    assert list(spans) == [f"read {stage}" for stage in placement.walk.streamed]
    assert {span.resource for span in spans.values()} == {Resource.disk}
    assert all(spans[f"read {s}"].end - spans[f"read {s}"].begin == seconds for s, seconds in counters.reads.items())
    assert all(begin <= span.begin <= span.end for span in spans.values())
    assert sum(span.num_bytes for span in spans.values()) == counters.bytes_read > 0


def test_a_failed_read_reaches_the_engine_once_and_unchanged(
    shape: ModelShape, reader: CountingReader, tmp_path: Path
) -> None:
    placement = placement_of(shape, resident_layers=0)
    with pytest.raises(CheckpointError, match="changed while in use") as error:  # noqa: PT012, SIM117
        with WeightStream(shape, placement, DEVICE, reader) as stream:
            (tmp_path / "model").write_bytes(b"")
            stream.read(placement.walk.streamed[0])
            stream.acquire(placement.walk.streamed[0])
    assert not getattr(error.value, "__notes__", [])


def test_a_read_that_fails_unseen_is_reported_when_the_stream_closes(
    shape: ModelShape, reader: CountingReader, tmp_path: Path
) -> None:
    placement = placement_of(shape, resident_layers=0)
    with pytest.raises(CheckpointError, match="changed while in use"):  # noqa: PT012, SIM117
        with WeightStream(shape, placement, DEVICE, reader) as stream:
            (tmp_path / "model").write_bytes(b"")
            stream.read(placement.walk.streamed[0])
