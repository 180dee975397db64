"""The stages of a pass and the slots they use: the input of a schedule, apart from the number of lanes."""

from dataclasses import dataclass
from functools import cached_property

from ...config.orders import PLAIN, Order


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The path of a pass: streamed stages, slots, transfers, and the stages in which lanes stop.

    `block`: streamed stages read together as a group; 1 unless configured.
    """

    num_stages: int  # the last stage is num_stages - 1, also if `first_stage` is above 0
    streamed: tuple[int, ...]
    num_slots: int  # weight slots in compute memory
    num_staging_slots: int = 0  # host slots before device slots; 0 without a device
    in_host: frozenset[int] = frozenset()  # streamed stages held in host memory: never read from disk
    copies: bool = False  # from host to device
    block: int = 1
    first_stage: int = 0  # above 0 on later pipeline ranks, and if decode passes skip an encoder
    order: Order = PLAIN
    num_pages: int = 1  # pieces per streamed stage
    cpu_attention: tuple[int, ...] = ()  # stages with attention on the CPU's workers
    batched_experts: tuple[int, ...] = ()  # stages that run experts once over all lanes
    offloaded_kv: tuple[int, ...] = ()  # stages with KV in another tier, fetched and stored
    num_kv_slots: int = 0  # each holds one lane's KV of one stage
    is_lane_major: bool = False  # a lane runs all stages before the next lane starts, so that the next rank has work
    receives: bool = False  # hidden states from the previous rank, before the first stage
    sends: bool = False  # hidden states to the next rank, after the last stage

    @cached_property
    def from_disk(self) -> tuple[int, ...]:
        """The streamed stages that each pass reads from disk."""
        return tuple(stage for stage in self.streamed if stage not in self.in_host)

    @property
    def reads(self) -> bool:
        return bool(self.from_disk)

    @property
    def stages(self) -> range:
        return range(self.first_stage, self.num_stages)

    def turns(self, num_lanes: int) -> list[tuple[int, int]]:
        """Returns stage and lane of each turn, in order."""
        if self.is_lane_major:
            return [(stage, lane) for lane in range(num_lanes) for stage in self.stages]
        return [(stage, lane) for stage in self.stages for lane in range(num_lanes)]
