"""What a search for a policy came to, and why, in words."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...resources import Resource
from .policy import Policy
from .ridge_points import OperatingPoint


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy that fits, with what the roofline and the simulator predict for the whole workload. `binding`: what is
    busy longest in decode passes, by the simulator."""

    policy: Policy
    roofline_seconds: float
    seconds: float
    binding: Resource
    tokens_per_second: float  # generated
    full_memory: str  # the one that is closest to its budget
    full_share: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`table` is sorted, the fastest first. `busy_seconds` are those of a decode pass of the best, by the roofline."""

    table: tuple[Candidate, ...]
    busy_seconds: Mapping[Resource, float]
    operating_point: OperatingPoint

    @property
    def best(self) -> Candidate:
        return self.table[0]

    @property
    def binding(self) -> Resource:
        return self.best.binding

    @property
    def roofline_binding(self) -> Resource:
        return max(self.busy_seconds, key=lambda resource: self.busy_seconds[resource])

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest that is another way and not another size, if there is one."""
        others = [each for each in self.table[1:] if each.policy.way != self.best.policy.way]
        return (others or list(self.table[1:]) or [None])[0]

    @property
    def why(self) -> tuple[str, ...]:
        best, other = self.best, self.runner_up
        return (
            f"policy {best.policy.digest}: {best.policy}: {best.tokens_per_second:.4g} tokens/s predicted",
            *([f"runner-up: {other.policy}: {other.tokens_per_second:.4g} tokens/s predicted"] if other else []),
            self._binding_words(),
            self._turning_words(),
            f"{best.full_memory} memory is {best.full_share:.0%} full",
            *self._attention_words(),
        )

    def _binding_words(self) -> str:
        parts = [f"{resource.value} {s:.3g} s" for resource, s in self.busy_seconds.items() if s]
        is_same = self.binding is self.roofline_binding
        roofline = "" if is_same else f"; of such a pass alone {self.roofline_binding.value} would be"
        return f"{self.binding.value} is the limit; by the roofline a decode pass takes {', '.join(parts)}{roofline}"

    def _turning_words(self) -> str:
        at, points = self.operating_point, self.operating_point.points
        first = "unknown" if points.p1 is None else f"{points.p1:.3g}"
        is_past = at.feed_forward >= points.p2
        return (
            f"turning points of feed-forward weights: P1 {first}, P2 {points.p2:.3g} FLOPs per byte; the block has "
            f"{at.feed_forward:.3g}, {'past' if is_past else 'short of'} P2, which takes "
            f"{at.needed_sequences:,.0f} sequences"
        )

    def _attention_words(self) -> list[str]:
        first = self.operating_point.points.p1
        if first is None or self.operating_point.attention >= first:
            return []
        return [
            f"attention has {self.operating_point.attention:.3g} FLOPs per byte of KV, below P1: it belongs beside "
            "the KV"
        ]
