"""Plays the actions of one pass on real lanes: the one interpreter of schedules."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..errors import ConfigError, Interrupted
from ..events import Event, NeedAttention, NeedExperts, NeedStage, Weights
from ..plan.schedule.actions import Action, Op
from ..stream.kv import KVStream
from ..stream.weights import WeightStream
from .experts import BatchedExperts
from .lanes.lane import Lane
from .monitor import PassMonitor
from .workers import AttentionWorkers

Stops: TypeAlias = tuple[type[Event], ...]


@dataclass(frozen=True, kw_only=True)
class Crew:
    """Who carries out what the actions say. `weights_of` gives a stage's weights, once they are in compute memory.

    `should_stop` is asked whenever a lane enters a stage; when it says yes, `Interrupted` is raised. `workers` are
    there where the CPU attends, `kv` where keys and values travel.
    """

    weights: WeightStream
    weights_of: Callable[[int], Weights]
    experts: BatchedExperts
    monitor: PassMonitor
    should_stop: Callable[[], bool]
    workers: AttentionWorkers | None
    kv: KVStream | None
    first_layer: int  # the stage of decoder layer 0


class PassPlayer:
    """One pass. `lanes` have begun it and wait for `events`; stages in `travelling` want their KV fetched."""

    def __init__(self, lanes: Rows[Lane], events: Rows[NeedStage], crew: Crew, travelling: Iterable[int]):
        self._lanes, self._crew, self._travelling = lanes, crew, frozenset(travelling)
        self._events: list[Event | None] = list(events)
        self._attending: dict[int, Future[torch.Tensor]] = {}  # by lane
        self._mixed: dict[int, torch.Tensor] = {}  # the experts' answers, by lane
        self._do: dict[Op, Callable[[Action], None]] = {
            Op.read: lambda action: crew.weights.read(action.its_stage, action.page),
            Op.copy: lambda action: crew.weights.copy(action.its_stage, action.page),
            Op.free: lambda action: crew.weights.free(action.its_stage),
            Op.run: self._run,
            Op.pre: self._pre,
            Op.attend: self._attend,
            Op.post: self._post,
            Op.route: self._route,
            Op.experts: self._run_experts,
            Op.end: self._end,
            Op.fetch: self._fetch,
            Op.store: self._store,
            Op.sync: self._sync,
        }

    def play(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._do[action.op](action)

    def finish(self) -> None:
        """The player is of no more use: it lets go of the lanes at once, not when garbage is next collected."""
        self._do.clear()
        assert not any(self._events), f"lanes still wait for {self._events} after the last stage"

    def _run(self, action: Action) -> None:
        self._crew.experts.expect(action.its_stage)
        self._enter(action)

    def _pre(self, action: Action) -> None:
        self._enter(action, (NeedAttention,))

    def _attend(self, action: Action) -> None:
        stage, lane = action.turn
        event = self._events[lane]
        if isinstance(event, NeedAttention) and event.is_decode:  # not every layer of every family attends
            assert self._crew.workers is not None, f"'{action}': nobody attends on the CPU"
            self._attending[lane] = self._crew.workers.submit(self._crew.monitor.watched(stage, action, event.compute))

    def _post(self, action: Action) -> None:
        event = self._events[action.turn[1]]
        if isinstance(event, NeedAttention):
            self._go_on(action, self._attended(action, event))

    def _route(self, action: Action) -> None:
        stage, lane = action.turn
        event = self._events[lane]
        if isinstance(event, NeedAttention):
            self._go_on(action, self._attended(action, event), (NeedExperts,))
        elif event == NeedStage(stage):
            self._crew.experts.expect(stage)
            self._enter(action, (NeedExperts,))

    def _run_experts(self, action: Action) -> None:
        parked = [(lane, event) for lane, event in enumerate(self._events) if isinstance(event, NeedExperts)]
        if parked:
            begin = self._crew.monitor.begin_compute()
            answers = self._crew.experts.run(action.its_stage, [event for _, event in parked])
            self._crew.monitor.end_compute(action.its_stage, action, begin)
            self._mixed = {lane: answer for (lane, _), answer in zip(parked, answers, strict=True)}

    def _end(self, action: Action) -> None:
        answer = self._mixed.pop(action.turn[1], None)
        if answer is not None:
            self._go_on(action, answer)

    def _fetch(self, action: Action) -> None:
        stage, lane = action.turn
        self._kv.fetch(self._layer(stage), lane, self._lanes[lane].kv.pages)

    def _store(self, action: Action) -> None:
        stage, lane = action.turn
        layer = self._layer(stage)
        self._lanes[lane].kv.unbind(layer)
        self._kv.store(layer, lane, self._lanes[lane].kv.changed)

    def _sync(self, action: Action) -> None:
        self._crew.weights.sync()
        if self._crew.kv is not None:
            self._crew.kv.sync()

    def _enter(self, action: Action, stops: Stops = ()) -> None:
        if self._crew.should_stop():
            raise Interrupted("stopped on request; start the same command again to go on")
        stage, lane = action.turn
        event = self._events[lane]
        if event != NeedStage(stage):
            raise ConfigError(
                f"model.path: this model's class asks for {event} where '{action}' is due: its layers do not follow "
                "one another, so they cannot be streamed"
            )
        if stage in self._travelling:
            layer = self._layer(stage)
            self._lanes[lane].kv.bind(layer, self._kv.acquire(layer, lane))
        self._go_on(action, self._crew.weights_of(stage), stops)

    def _go_on(self, action: Action, answer: Weights | torch.Tensor, stops: Stops = ()) -> None:
        """Until the lane asks for another stage, or for one of `stops`. A stage may be several modules: the lane asks
        for its weights again."""
        stage, lane = action.turn
        begin = self._crew.monitor.begin_compute()
        event = self._lanes[lane].advance(answer)
        while event is not None and not isinstance(event, stops) and not _leaves(event, stage):
            event = self._lanes[lane].advance(self._answer(stage, event))
        self._events[lane] = event
        self._crew.monitor.end_compute(stage, action, begin)

    def _attended(self, action: Action, event: NeedAttention) -> torch.Tensor:
        """The workers' answer, or where they have not been asked one's own."""
        stage, lane = action.turn
        self._crew.experts.expect(stage)  # the lane that goes on is the next one to ask for experts
        pending = self._attending.pop(lane, None)
        return pending.result() if pending is not None else self._attend_here(stage, event)

    def _attend_here(self, stage: int, event: NeedAttention) -> torch.Tensor:
        begin = self._crew.monitor.begin_compute()
        out = event.compute()
        self._crew.monitor.end_attention(stage, begin)
        return out

    def _answer(self, stage: int, event: Event) -> Weights | torch.Tensor:
        """At once, where the lane stands."""
        if isinstance(event, NeedStage):
            return self._crew.weights_of(stage)
        if isinstance(event, NeedExperts):
            return self._crew.experts.run(stage, [event])[0]
        return self._attend_here(stage, event)

    @property
    def _kv(self) -> KVStream:
        assert self._crew.kv is not None, "keys and values travel without a stream"
        return self._crew.kv

    def _layer(self, stage: int) -> int:
        return stage - self._crew.first_layer


def _leaves(event: Event, stage: int) -> bool:
    return isinstance(event, NeedStage) and event.stage != stage
