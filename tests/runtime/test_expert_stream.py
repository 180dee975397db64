"""Experts arrive with the file's bytes, in order, ahead of their use, and only those that are due are read."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from runtime.config.settings import ExpertPaging
from runtime.errors import CheckpointError
from runtime.model.loading import LoadedModel
from runtime.plan.shape.extents import Extent, slot_layout
from runtime.store.reader import Reader
from runtime.store.transfer import PendingTransfer
from runtime.stream.experts import ExpertStream
from runtime.trace import Trace
from tests.runtime.expert_support import DEVICE, lanes_of, load, placement_of, player
from tests.support import synthesize

NUM_EXPERTS, STAGES = 512, (1, 2)


@pytest.fixture(scope="module")
def loaded(many_experts: Callable[[str], Path]) -> LoadedModel:
    return load(many_experts("qwen3-next"))


class RecordingReader(Reader):
    """Keeps what was asked for, in order."""

    def __init__(self) -> None:
        super().__init__(num_threads=2)
        self.asked: list[tuple[Extent, ...]] = []
        self.targets: list[int] = []

    def submit(self, extents: Sequence[Extent], target: memoryview) -> PendingTransfer:
        self.asked.append(tuple(extents))
        self.targets.append(torch.frombuffer(target, dtype=torch.uint8).data_ptr())
        return super().submit(extents, target)


@pytest.fixture
def reader() -> Iterator[RecordingReader]:
    reader = RecordingReader()
    with reader:
        yield reader


def open_stream(loaded: LoadedModel, reader: Reader, paging: ExpertPaging, num_slots: int = 2) -> ExpertStream:
    placement = placement_of(loaded, paging)
    return ExpertStream(loaded.shape, placement, DEVICE, reader, paging=paging, num_slots=num_slots)


def extents_of(loaded: LoadedModel, stage: int, experts: Sequence[int]) -> list[tuple[Extent, ...]]:
    return [slot_layout(loaded.shape.stages[stage].expert(expert)).extents for expert in experts]


@pytest.mark.parametrize("num_slots", [2, 3, 5])
def test_hit_experts_are_read_in_order_and_no_others(
    num_slots: int, loaded: LoadedModel, reader: RecordingReader
) -> None:
    hit = [0, 7, 8, 9, 100, 159]
    with open_stream(loaded, reader, ExpertPaging.hit, num_slots) as stream:
        for stage in STAGES:
            assert [found.expert for found in stream.experts(stage, hit)] == hit
    assert reader.asked == extents_of(loaded, STAGES[0], hit) + extents_of(loaded, STAGES[1], hit)
    assert len(set(reader.targets)) == num_slots


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("paging", [ExpertPaging.hit, ExpertPaging.all])
def test_while_an_expert_is_used_the_next_are_on_their_way(
    paging: ExpertPaging, num_slots: int, loaded: LoadedModel, reader: RecordingReader
) -> None:
    with open_stream(loaded, reader, paging, num_slots) as stream:
        for turn, _ in enumerate(stream.experts(2, range(NUM_EXPERTS))):
            assert len(reader.asked) == min(turn + num_slots, NUM_EXPERTS)
            assert reader.targets[turn] not in reader.targets[turn + 1 :], "the slot in use is written into"
            reader.targets = reader.targets[: turn + num_slots]


def test_experts_come_in_groups_while_the_next_group_is_read(loaded: LoadedModel, reader: RecordingReader) -> None:
    groups = [[4, 5, 90], [6, 7, 8], [1]]
    with open_stream(loaded, reader, ExpertPaging.hit, num_slots=6) as stream:
        assert stream.group_size == 3
        for turn, found in enumerate(stream.groups(2, groups)):
            assert [each.expert for each in found] == groups[turn]
            assert len(reader.asked) == [6, 7, 7][turn]
            begin = 3 * turn
            assert not set(reader.targets[begin : begin + len(found)]) & set(reader.targets[begin + len(found) :])
        counters = stream.take_counters()
        assert counters.num_experts_hit == counters.num_experts_read == 7
        assert [len(found) for found in stream.groups(1, groups)] == [3, 3, 1]
        stream.end_pass(0, 1, is_counted=True)
        assert stream.routing is not None
        assert sum(stream.routing.hit_rates) == pytest.approx(14)
        left = stream.groups(2, groups)
        next(left)
        left.close()
        assert [len(found) for found in stream.groups(1, [[0, 1, 2]])] == [3], "slots were given back"
    with open_stream(loaded, reader, ExpertPaging.all, num_slots=6) as stream:
        assert stream.group_size == 1
        assert [found[0].expert for found in stream.groups(2, [[3], [9]])] == [3, 9]


def test_each_expert_has_the_files_bytes(loaded: LoadedModel, reader: RecordingReader) -> None:
    stage = loaded.shape.stages[2]
    with open_stream(loaded, reader, ExpertPaging.hit) as stream:
        for found in stream.experts(2, [3, 50, 51]):
            for parameter, stack in zip(found.stage.parameters, stage.experts, strict=True):
                assert parameter.slices == tuple(stack.pieces[found.expert])
                for piece in parameter.slices:
                    begin = found.stage_bytes.tensor_offsets[piece.name]
                    placed = found.stage_bytes.buffer[begin : begin + piece.num_bytes].numpy().tobytes()
                    assert placed == Path(piece.file).read_bytes()[piece.offset : piece.offset + piece.num_bytes]


def test_all_experts_begin_to_arrive_before_anyone_knows_which_are_hit(
    loaded: LoadedModel, reader: RecordingReader
) -> None:
    with open_stream(loaded, reader, ExpertPaging.all, num_slots=3) as stream:
        stream.prefetch(2)
        assert reader.asked == extents_of(loaded, 2, range(3))
        stream.prefetch(2)
        assert len(reader.asked) == 3, "begun twice"
        assert [found.expert for found in stream.experts(2, [1, 90])] == [1, 90]
    assert reader.asked == extents_of(loaded, 2, range(NUM_EXPERTS))


def test_experts_count_for_their_stage_and_are_named_in_the_trace(loaded: LoadedModel, reader: RecordingReader) -> None:
    placement, trace = placement_of(loaded, ExpertPaging.hit), Trace()
    with ExpertStream(loaded.shape, placement, DEVICE, reader, paging=ExpertPaging.hit, trace=trace) as stream:
        assert len(list(stream.experts(2, [5, 90]))) == 2
        counters = stream.take_counters()
    assert set(counters.reads) == {2}
    assert counters.num_hits + counters.num_misses == 2
    assert [span.name for span in trace.take()] == ["read 2 expert 5", "read 2 expert 90"]


def test_what_was_begun_for_another_stage_is_dropped(loaded: LoadedModel, reader: RecordingReader) -> None:
    with open_stream(loaded, reader, ExpertPaging.all) as stream:
        stream.prefetch(1)
        assert [found.expert for found in stream.experts(2, [5])] == [5]
    assert reader.asked == extents_of(loaded, 1, range(2)) + extents_of(loaded, 2, range(NUM_EXPERTS))


def test_hits_that_nobody_knows_yet_are_not_expected(loaded: LoadedModel, reader: RecordingReader) -> None:
    with open_stream(loaded, reader, ExpertPaging.hit) as stream:
        stream.prefetch(2)
        assert not reader.asked


def test_an_expert_left_in_the_middle_gives_its_slot_back(loaded: LoadedModel, reader: RecordingReader) -> None:
    with open_stream(loaded, reader, ExpertPaging.hit) as stream:
        for _ in range(3):
            left = stream.experts(2, [1, 2, 3])
            next(left)
            left.close()
        assert [found.expert for found in stream.experts(1, [1, 2, 3])] == [1, 2, 3]


@pytest.mark.parametrize("paging", [ExpertPaging.hit, ExpertPaging.all])
def test_reads_are_counted_as_often_as_asked_and_hits_once(
    paging: ExpertPaging, loaded: LoadedModel, reader: RecordingReader
) -> None:
    with open_stream(loaded, reader, paging) as stream:
        for stage, hit in [(STAGES[0], [1, 2, 90]), (STAGES[0], [2, 3]), (STAGES[1], [2])]:
            list(stream.experts(stage, hit))
        counters = stream.take_counters()
        assert counters.num_experts == 2 * NUM_EXPERTS
        assert counters.num_experts_hit == 5
        assert counters.num_experts_read == (6 if paging is ExpertPaging.hit else 3 * NUM_EXPERTS) == len(reader.asked)
        assert set(counters.reads) == set(counters.stalls) == set(STAGES)
        assert stream.take_counters().num_experts_hit == 0


def test_lanes_that_ask_one_by_one_read_their_hits_each_and_together_once(loaded: LoadedModel) -> None:
    """The same tokens in each lane, so they hit the same experts."""
    lanes = lanes_of(1, 1, 3) * 3
    read: dict[bool, int] = {}
    for is_batched in (False, True):
        with player(loaded, ExpertPaging.hit) as played:
            assert played.experts is not None
            played.logits(lanes, is_batched=is_batched)
            read[is_batched] = played.experts.take_counters().bytes_read
    assert read[False] == 3 * read[True]


@pytest.mark.parametrize("groups", [[[0], [1]], [[0, 1]]])
def test_a_failed_read_reaches_who_asks(groups: list[list[int]], tmp_path: Path, reader: RecordingReader) -> None:
    loaded = load(synthesize("qwen3-moe", tmp_path / "model"))
    with pytest.raises(CheckpointError, match="changed while in use"):  # noqa: PT012, SIM117
        with open_stream(loaded, reader, ExpertPaging.hit, num_slots=4) as stream:
            for path in (tmp_path / "model").glob("*.safetensors"):
                path.write_bytes(b"")
            list(stream.groups(1, groups))
