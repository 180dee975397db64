"""What a stream carried since it was last asked: bytes by tier, seconds by stage, and whether bytes came in time."""

from collections import defaultdict
from dataclasses import dataclass, field


def _by_stage() -> defaultdict[int, float]:
    return defaultdict(float)


@dataclass(kw_only=True)
class StreamCounters:
    """`reads` and `copies` are the busy seconds of disk and link, `stalls` those that compute waited, all by stage.

    A hit is a streamed stage whose bytes were there when a lane first asked for it. On an accelerator the host's
    waiting may hide behind compute that is queued already, so `stalls` is an upper bound there.

    Of experts that are read one by one: those of the layers that lanes passed, and those of them that a token visited,
    each once, however many lanes asked; and how many were brought in, each as often as that happened.
    """

    bytes_read: int = 0  # disk -> host
    bytes_copied: int = 0  # host -> device
    bytes_returned: int = 0  # device -> host
    bytes_written: int = 0  # host -> disk
    num_hits: int = 0
    num_misses: int = 0
    num_experts: int = 0
    num_experts_hit: int = 0
    num_experts_read: int = 0
    reads: defaultdict[int, float] = field(default_factory=_by_stage)
    copies: defaultdict[int, float] = field(default_factory=_by_stage)
    stalls: defaultdict[int, float] = field(default_factory=_by_stage)

    def count_ask(self, is_in_time: bool) -> None:
        """A lane asks for a streamed stage, for the first time since it was brought in."""
        self.num_hits += is_in_time
        self.num_misses += not is_in_time
