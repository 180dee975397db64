"""Lanes, experts and workers that compute nothing, for as long as they are told, and a stream that watches the engine's
thread: for a timed device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch

from runtime.events import Event, NeedAttention, NeedExperts, NeedStage
from runtime.plan.cost.simulator import Durations
from runtime.plan.schedule.walk import Walk
from runtime.stream.weights import WeightStream
from tests.timed_device import TimedDevice
from tests.virtual_time import VirtualFuture, VirtualPool, VirtualTime


class ScriptedLane:
    """Asks for every stage of the walk, and where the walk says so for attention and experts; what it computes takes as
    long as `durations` say."""

    def __init__(self, device: TimedDevice, walk: Walk, durations: Durations, lane: int, *, is_in_step: bool):
        self._device, self._durations, self._lane, self._is_in_step = device, durations, lane, is_in_step
        self._walk, self._stage, self._stops = walk, walk.first_stage, list[Event]()
        self.sequences = [lane]  # a row, for the trace

    def begin_pass(self, new_tokens: Sequence[int] | None = None) -> NeedStage:
        return NeedStage(self._stage)

    def advance(self, answer: object) -> Event | None:
        stage, lane, seconds = self._stage, self._lane, self._durations
        if isinstance(answer, dict):
            if stage in self._walk.cpu_attention:
                self._compute(seconds.pre(stage, lane))
                return NeedAttention(lambda: self._attend(stage), is_decode=True)
            if stage in self._walk.batched_experts:
                self._compute(seconds.route(stage, lane))
                return NeedExperts(torch.nn.Identity(), torch.empty(0), torch.empty(0), torch.empty(0))
            self._compute(seconds.run(stage, lane))
        else:
            self._compute((seconds.end if stage in self._walk.batched_experts else seconds.post)(stage, lane))
        self._stage += 1
        return NeedStage(self._stage) if self._stage < self._walk.num_stages else None

    def _attend(self, stage: int) -> torch.Tensor:
        return torch.empty(0)

    def _compute(self, seconds: float) -> None:
        self._device.compute(seconds)
        if self._is_in_step:
            self._device.wait_for_compute()


class ScriptedExperts:
    def __init__(self, device: TimedDevice, durations: Durations, *, is_in_step: bool):
        self._device, self._durations, self._is_in_step = device, durations, is_in_step

    def prefetch(self, stage: int) -> None: ...

    def run(self, stage: int, asked: Sequence[NeedExperts]) -> list[torch.Tensor]:
        self._device.compute(self._durations.experts(stage))
        if self._is_in_step:
            self._device.wait_for_compute()
        return [torch.empty(0)] * len(asked)


class ScriptedWorkers:
    def __init__(self, clock: VirtualTime):
        self._pool = VirtualPool(clock, 1)

    def submit(self, compute: Callable[[], torch.Tensor]) -> VirtualFuture[torch.Tensor]:
        return self._pool.submit(compute)


class PromptStream(WeightStream):
    """Fails where the engine's thread waits in any but `acquire`."""

    def read(self, stage: int, page: int | None = None) -> None:
        with self._at_once():
            super().read(stage, page)

    def copy(self, stage: int, page: int | None = None) -> None:
        with self._at_once():
            super().copy(stage, page)

    def free(self, stage: int) -> None:
        with self._at_once():
            super().free(stage)

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        clock = cast(TimedDevice, self._device).time
        begin = clock.now
        yield
        assert clock.now == begin, f"the engine's thread has waited {clock.now - begin} s"
