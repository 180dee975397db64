"""One timer, and the statistics of what it reads: a run that is about to start takes the median of a few acts; whoever
has the time goes in rounds over all probes, so that a spread shows what a minute changes.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

GIGA = 1e9
SHORTEST_SECONDS = 1e-7  # that a clock tells from nothing
OVER_SHARE = 0.25  # by which rounds may pass the time they were given: each probe ends its share with a whole reading
READING_SECONDS = 4e-3  # at least: shorter ones are as long as what starts and stops the clock
NUM_REPEATS = 5  # of an act, where a run waits for its rate
LONG_SECONDS = 0.1  # what takes so long is done once: it is its own average

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The median of the rounds, the least and the most of them, in `unit`."""

    value: float
    low: float
    high: float
    unit: str

    @property
    def spread(self) -> float:
        """How far from the median a round was at most, as a share of it."""
        return max(self.high - self.value, self.value - self.low) / self.value if self.value else 0.0

    def agrees_with(self, other: "Figure") -> bool:
        """Whether there is a value that both have seen."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, kw_only=True)
class MeasuredFigures:
    """`figures` by name, each from `num_rounds` rounds, of which the last took `round_seconds`."""

    figures: dict[str, Figure]
    num_rounds: int
    round_seconds: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """`read` takes one reading, in `unit`. Its first call may take longer and tell nonsense."""

    name: str
    unit: str
    read: Callable[[], float]


class Timer:
    """Times `act`, which does `amount` of something, and `finish`, which waits for what `act` has only begun.

    Called as a probe, it takes one reading, in units of 1e9 a second, of as many acts as it takes to last
    `READING_SECONDS`. `rate` and `rate_once` are for a run that cannot wait so long, in units a second.
    """

    def __init__(
        self,
        amount: float,
        act: Callable[[], object],
        finish: Callable[[], object] = lambda: None,
        *,
        clock: Clock = time.perf_counter,
    ):
        self._amount, self.act, self._finish, self._clock = amount, act, finish, clock
        self._num_acts = 0  # of a reading

    def __call__(self) -> float:
        if not self._num_acts:
            seconds = self.warm_seconds()
            if self._num_acts == 1:
                return self._amount / seconds / GIGA
        return self._amount * self._num_acts / self._run(self._num_acts) / GIGA

    def rate(self) -> float:
        return self._amount / self.seconds()

    def rate_once(self) -> float:
        """The rate of the first act: what is read from a disk is read for good."""
        return self._amount / self._run(1)

    def seconds(self) -> float:
        """The median of a few acts; the first, which compiles and takes up pages, is not counted, and the first long
        one behind it decides."""
        self._run(1)
        found: list[float] = []
        while len(found) < NUM_REPEATS:
            found.append(self._run(1))
            if found[-1] > LONG_SECONDS:
                return found[-1]
        return median(found)

    def warm_seconds(self) -> float:
        """The seconds of an act behind another, which compiles and takes up pages, and decides nothing."""
        self._run(1)
        seconds = max(self._run(1), SHORTEST_SECONDS)
        self._num_acts = max(1, math.ceil(READING_SECONDS / seconds))
        return seconds

    def _run(self, num_acts: int) -> float:
        begin = self._clock()
        for _ in range(num_acts):
            self.act()
        self._finish()
        return self._clock() - begin


def measure(
    probes: Sequence[Probe],
    *,
    num_rounds: int,
    seconds: float,
    clock: Clock = time.perf_counter,
    advance: Callable[[str], object] = lambda name: None,
) -> MeasuredFigures:
    """Reads each probe in each round as often as its share of `seconds` allows, once at least; a round's value is the
    median of its readings. Behind the first, no round begins that would end after `seconds` if it took as long as the
    last one. `advance` is told each probe that a round, or the warm-up before them, is done with."""
    for probe in probes:
        probe.read()
        advance(probe.name)
    share = seconds / (num_rounds * max(len(probes), 1))
    rounds: dict[str, list[float]] = {probe.name: [] for probe in probes}
    begin, num_done, round_seconds = clock(), 0, 0.0
    while num_done < num_rounds and (not num_done or clock() - begin + round_seconds <= seconds * (1 + OVER_SHARE)):
        round_begin = clock()
        for probe in probes:
            probe_begin, readings = clock(), [probe.read()]
            while clock() - probe_begin < share:
                readings.append(probe.read())
            rounds[probe.name].append(median(readings))
            advance(probe.name)
        num_done, round_seconds = num_done + 1, clock() - round_begin
    figures = {probe.name: make_figure(rounds[probe.name], probe.unit) for probe in probes}
    return MeasuredFigures(figures=figures, num_rounds=num_done, round_seconds=round_seconds)


def make_figure(values: Sequence[float], unit: str) -> Figure:
    return Figure(value=median(values), low=min(values), high=max(values), unit=unit)
