"""Timers, and statistics of what they measure.

A reading is one measured rate, of one or more calls of the timed function. A probe is a named measurement that returns
readings. `jobs.measure` reads all probes in turn, in several rounds: the spread between rounds shows how rates change
over time. Planning a run takes the median of a few calls instead."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

GIGA = 1e9
SHORTEST_SECONDS = 1e-7  # resolution of the clock
OVER_SHARE = 0.25  # share by which rounds may exceed their time, because each probe finishes its last reading
READING_SECONDS = 4e-3  # least length of a reading, so that reading the clock takes no significant time
NUM_REPEATS = 5  # calls for `Timer.rate`
LONG_SECONDS = 0.1  # `Timer.rate` does not repeat longer calls

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured quantity: median, minimum and maximum of its rounds, in `unit`."""

    value: float
    low: float
    high: float
    unit: str

    @property
    def spread(self) -> float:
        """The largest deviation of a round from the median, as a share of the median."""
        return max(self.high - self.value, self.value - self.low) / self.value if self.value else 0.0

    def agrees_with(self, other: "Figure") -> bool:
        """True if the ranges from minimum to maximum overlap."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, kw_only=True)
class MeasuredFigures:
    """`figures` by probe name, from `num_rounds` rounds. `round_seconds`: duration of the last round."""

    figures: dict[str, Figure]
    num_rounds: int
    round_seconds: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A named measurement: `read` returns one reading in `unit`. The first call is a warm-up; ignore its value."""

    name: str
    unit: str
    read: Callable[[], float]


class Timer:
    """Measures the rate of `act`, which does `amount` of work (FLOPs, bytes or numbers). `finish` waits for
    asynchronous work that `act` started.

    Calling the timer returns a reading in 1e9 units of work per second, over as many calls of `act` as take
    `READING_SECONDS`. For planning, `rate` and `rate_once` take less time, and return units of work per second.
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
        self._num_acts = 0  # calls of `act` in a reading; 0 before the warm-up

    def __call__(self) -> float:
        if not self._num_acts:
            seconds = self.warm_seconds()
            if self._num_acts == 1:
                return self._amount / seconds / GIGA
        return self._amount * self._num_acts / self._run(self._num_acts) / GIGA

    def rate(self) -> float:
        """Units of work per second, see `seconds`."""
        return self._amount / self.seconds()

    def rate_once(self) -> float:
        """Units of work per second of a single call without a warm-up, for disk reads."""
        return self._amount / self._run(1)

    def seconds(self) -> float:
        """The median of a few calls after a warm-up call, or the first call that takes over `LONG_SECONDS`."""
        self._run(1)
        times: list[float] = []
        while len(times) < NUM_REPEATS:
            times.append(self._run(1))
            if times[-1] > LONG_SECONDS:
                return times[-1]
        return median(times)

    def warm_seconds(self) -> float:
        """The seconds of a call after a warm-up call. Also sets how many calls a reading has."""
        self._run(1)
        seconds = max(self._run(1), SHORTEST_SECONDS)
        self._num_acts = max(1, math.ceil(READING_SECONDS / seconds))
        return seconds

    def _run(self, num_acts: int) -> float:
        """The seconds of `num_acts` calls of `act`, until `finish` returns."""
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
    """Reads all probes in rounds. Each probe gets an equal share of `seconds`: in each round it is read at least once,
    and repeatedly until its share for that round is used. A round's value is the median of its readings. Stops before a
    round that would exceed `seconds` by more than `OVER_SHARE`, if it took as long as the last one. Calls `advance`
    with a probe's name after its warm-up and after its readings in each round."""
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
