"""Ranks that see no memory in common: what each reads goes to the others by messages, and so does a stop."""

from collections.abc import Callable, Sequence

import pytest

from runtime import Runtime, RuntimeConfig
from runtime.config.settings import DevicesConfig, Gather, Parallelism
from runtime.engine.session import LaneSlots
from runtime.errors import ConfigError
from runtime.plan.shape.extents import ALIGNMENT_BYTES, Extent, even_reader_share
from runtime.ranks.ranks import Ranks
from runtime.ranks.shared_memory import SharedMemory
from tests.rank_processes import in_nodes
from tests.runtime.rank_runs import completed, stopped_once
from tests.runtime.test_families import config_for
from tests.support import Reference

References = Callable[[str], Reference]


def between_nodes(ranks: Ranks, config: RuntimeConfig, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], str]:
    """What a run comes to whose ranks are in nodes of their own, and how one ends that is stopped."""
    assert not ranks.is_on_one_machine
    ranks.devices = DevicesConfig(way=Parallelism.sharded, gather=Gather.memory)
    with pytest.raises(ConfigError, match=r"devices\.gather=memory"):
        SharedMemory.create(ranks)
    ranks.devices = DevicesConfig(way=Parallelism.sharded)
    return completed(Runtime(config, ranks=ranks), prompts), stopped_once(ranks, config, prompts)


def test_ranks_in_nodes_of_their_own_gather_what_each_has_read_and_stop_together(reference: References) -> None:
    ref = reference("llama")
    for found, ended in in_nodes(2, between_nodes, config_for(ref), ref.prompts):
        assert found == ref.expected
        assert "same command" in ended


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_even_shares_are_of_one_size_side_by_side_and_all_read_the_few_blocks_that_are_left(count: int) -> None:
    extents = [
        Extent(file="a", offset=4096, num_bytes=5 * 4096, used_bytes=18_000, slot_offset=8192),
        Extent(file="b", offset=0, num_bytes=3 * 4096, used_bytes=100, slot_offset=7 * 4096),
    ]
    size = 8 // count * ALIGNMENT_BYTES
    for index in range(count):
        own, begin, end = even_reader_share(extents, index, count)
        read = {part.slot_offset + at for part in own for at in range(0, part.num_bytes, ALIGNMENT_BYTES)}
        rest = range(end, 10 * 4096, ALIGNMENT_BYTES)
        assert (begin, end) == (8192, 8192 + count * size)
        assert read == {*range(begin + index * size, begin + (index + 1) * size, ALIGNMENT_BYTES), *rest}
        assert len(rest) < count
    assert even_reader_share([], 0, 2) == ((), 0, 0)


@pytest.mark.parametrize(
    ("slots", "num_ranks", "expected"),
    [
        (LaneSlots(4, 6, 64), 2, LaneSlots(4, 3, 32, 50)),
        (LaneSlots(4, 1, 64), 2, LaneSlots(2, 1, 32, 50)),
        (LaneSlots(1, 1, 1), 4, LaneSlots(1, 1, 1, 75)),
    ],
)
def test_a_rank_has_its_share_of_the_seats_of_continuous_admission(
    slots: LaneSlots, num_ranks: int, expected: LaneSlots
) -> None:
    assert slots.share(num_ranks, 100) == expected
