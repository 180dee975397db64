"""What a pass walks over, and through which memory: all that a schedule is made from besides the number of lanes."""

from dataclasses import dataclass
from functools import cached_property

from ...config.orders import PLAIN, Order


@dataclass(frozen=True, kw_only=True)
class Walk:
    """How streamed stages travel: which ones, in how many slots, and whether each hop exists; and where lanes stop.

    `block`: stages are read in groups of this many; 1 for every other prefetch.
    """

    num_stages: int
    streamed: tuple[int, ...]
    num_slots: int  # where compute finds the weights
    num_staging_slots: int = 0  # host slots in front of device slots; 0 where one memory serves both
    in_host: frozenset[int] = frozenset()  # streamed stages whose weights host memory holds: they are never read
    copies: bool = False
    block: int = 1
    first_stage: int = 0  # where a pass begins
    order: Order = PLAIN
    num_pages: int = 1  # pieces that a streamed stage is brought in by
    cpu_attention: tuple[int, ...] = ()  # stages whose attention runs on the CPU's workers
    batched_experts: tuple[int, ...] = ()  # stages whose experts run once over all lanes
    offloaded_kv: tuple[int, ...] = ()  # stages whose KV lives in a tier
    num_kv_slots: int = 0  # each holds one lane's KV of one stage
    is_lane_major: bool = False  # a lane passes all stages before the next one begins, so that the rank behind has work
    receives: bool = False  # hidden states come from the rank before, in front of the first stage
    sends: bool = False  # they go to the rank behind, behind the last one

    @cached_property
    def from_disk(self) -> tuple[int, ...]:
        """The streamed stages that are read in each pass."""
        return tuple(stage for stage in self.streamed if stage not in self.in_host)

    @property
    def reads(self) -> bool:
        return bool(self.from_disk)

    @property
    def stages(self) -> range:
        return range(self.first_stage, self.num_stages)

    def turns(self, num_lanes: int) -> list[tuple[int, int]]:
        """Stage and lane of each turn, in their order."""
        if self.is_lane_major:
            return [(stage, lane) for lane in range(num_lanes) for stage in self.stages]
        return [(stage, lane) for stage in self.stages for lane in range(num_lanes)]
