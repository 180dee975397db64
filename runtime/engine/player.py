"""Plays the actions of one pass on real lanes: the one interpreter of schedules."""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows

import torch

from ..errors import Interrupted
from ..model.events import Event, NeedAttention, NeedExperts, NeedStage, Weights
from ..model.experts import sorted_experts
from ..plan.actions import Action, Op
from ..stream.weights import WeightStream
from .lane import Lane


class PassPlayer:
    """One pass. `lanes` have begun it and wait for `events`. `compute_seconds` were spent inside lanes.

    `weights_of` gives a stage's weights, once they are in compute memory. `should_stop` is asked whenever a lane enters
    a stage; when it says yes, `Interrupted` is raised.
    """

    def __init__(
        self,
        lanes: Rows[Lane],
        events: Rows[NeedStage],
        stream: WeightStream,
        weights_of: Callable[[int], Weights],
        should_stop: Callable[[], bool],
    ):
        self._lanes, self._stream, self._weights_of, self._should_stop = lanes, stream, weights_of, should_stop
        self._events: list[Event | None] = list(events)
        self.compute_seconds = 0.0
        self._do: dict[Op, Callable[[Action], None]] = {
            Op.read: lambda action: stream.read(action.stage),
            Op.copy: lambda action: stream.copy(action.stage),
            Op.free: lambda action: stream.free(action.stage),
            Op.run: self._run,
        }

    def play(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._do[action.op](action)

    def finish(self) -> None:
        assert not any(self._events), f"lanes still wait for {self._events} after the last stage"

    def _run(self, action: Action) -> None:
        """The whole stage, attention and experts where the lane meets them."""
        if self._should_stop():
            raise Interrupted("stopped on request; start the same command again to go on")
        event = self._events[action.lane]
        assert event == NeedStage(action.stage), f"'{action}': the lane waits for {event}"
        self._go_on(action, self._weights_of(action.stage))

    def _go_on(self, action: Action, answer: Weights | torch.Tensor, stops: tuple[type[Event], ...] = ()) -> None:
        """Until the lane asks for another stage, or for one of `stops`. A stage may be several modules: the lane asks
        for its weights again."""
        lane, stage = self._lanes[action.lane], NeedStage(action.stage)
        weights = self._weights_of(action.stage)
        begin = time.monotonic()
        event = lane.advance(answer)
        while (
            event is not None and not isinstance(event, stops) and (event == stage or not isinstance(event, NeedStage))
        ):
            event = lane.advance(weights if isinstance(event, NeedStage) else _answer(event))
        self._events[action.lane] = event
        self.compute_seconds += time.monotonic() - begin


def _answer(event: NeedAttention | NeedExperts) -> torch.Tensor:
    """At once, in the lane's place."""
    return sorted_experts(event) if isinstance(event, NeedExperts) else event.compute()
