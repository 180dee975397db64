"""Executes the actions of a schedule on lanes and streams."""

from collections.abc import Callable, Sequence
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from functools import partial
from typing import TypeAlias

import torch

from ..errors import ConfigError, Interrupted
from ..events import Event, NeedAttention, NeedExperts, NeedStage, Weights
from ..plan.schedule.actions import Action, Op
from ..plan.schedule.schedule import Schedule
from ..plan.schedule.walk import Walk
from ..ranks.collectives import PipelineLink
from ..stream.device import ComputeDevice
from ..stream.kv import KVStream
from .experts import BatchedExperts
from .lanes.lane import Lane
from .monitor import PassMonitor
from .setup import Streams


class PipelinePeers:
    """Pipeline-parallel transport: receives hidden states from the previous rank, sends them to the next, and
    broadcasts the tokens that the last rank samples. Tensors pass through host memory. `row_width`: int32 values per
    sampled row."""

    def __init__(self, link: PipelineLink, row_width: int, device: ComputeDevice):
        self._link, self._row_width, self._device = link, row_width, device
        self._lanes: Sequence[Lane] = ()
        self._incoming: Sequence[torch.Tensor | None] = ()  # receive buffers by lane, in host memory

    def begin(self, lanes: Sequence[Lane]) -> None:
        """Starts a pass: posts receives for the lanes that wait for the previous rank."""
        self._lanes = lanes
        self._incoming = [lane.hidden_in for lane in lanes]
        if self._device.is_accelerator:  # receive in host memory, then copy
            self._incoming = [
                None
                if target is None
                else self._device.host_pages(target.nbytes)[: target.nbytes].view(target.dtype).view(target.shape)
                for target in self._incoming
            ]
        self._link.begin(self._incoming)

    def receive(self, lane: int) -> None:
        """Blocks until the lane's hidden states have arrived, and copies them to its `hidden_in` buffer."""
        self._link.receive(lane)
        received, hidden_in = self._incoming[lane], self._lanes[lane].hidden_in
        if received is not None and hidden_in is not None and received is not hidden_in:
            hidden_in.copy_(received, non_blocking=True)  # `_incoming` keeps the source alive until `draw_tokens`

    def send(self, lane: int) -> None:
        """Starts sending the lane's hidden states to the next rank."""
        hidden_out = self._lanes[lane].hidden_out
        assert hidden_out is not None, f"lane {lane} has not left this rank's layers"
        self._link.send(lane, *self._device.to_host([hidden_out]))

    def draw_tokens(self, lanes: Sequence[Lane]) -> Sequence[torch.Tensor]:
        """Samples on the last rank, receives its tokens on the others. Returns one host tensor per lane."""
        self._lanes = ()
        if self._link.is_last:
            drawn = self._device.to_host([lane.sample() for lane in lanes])
            self._link.broadcast(torch.cat([each.reshape(-1) for each in drawn]))
            return drawn
        counts = [lane.expect_tokens() for lane in lanes]
        tokens = torch.empty(sum(counts) * self._row_width, dtype=torch.int32)
        self._link.receive_broadcast(tokens)
        self._device.wait_for_compute()  # copies from the receive buffers must end before these are freed
        self._incoming = ()
        return tokens.view(-1, self._row_width).split(counts)


RESUME_HINT = "start the same command again to resume"
Answer: TypeAlias = Weights | torch.Tensor
Stops: TypeAlias = tuple[type[Event], ...]


class Player:
    """Plays passes on one thread. A pass continues the prefetching of the one before it."""

    def __init__(
        self,
        streams: Streams,
        weights_of: Callable[[int], Weights],
        experts: BatchedExperts,
        monitor: PassMonitor,
        should_stop: Callable[[], bool],
        *,
        first_layer: int,
        peers: PipelinePeers | None = None,
    ):
        """`weights_of`: waits for a stage's weights in compute memory. `should_stop` is polled when a lane enters a
        stage; True raises `Interrupted`. `first_layer`: the stage of decoder layer 0. `peers`: of a pipeline."""
        self._streams, self._weights_of, self._experts = streams, weights_of, experts
        self._monitor, self._should_stop = monitor, should_stop
        self._first_layer, self._pipeline = first_layer, peers
        weights = streams.weights
        self._lanes: Rows[Lane] = ()
        self._events: list[Event | None] = []
        self._offloaded_stages = frozenset[int]()
        self._pending_attention: dict[int, Future[torch.Tensor]] = {}  # by lane
        self._expert_outputs: dict[int, torch.Tensor] = {}  # by lane
        self._last_schedule: Schedule | None = None
        self.has_failed = False
        self._handlers: dict[Op, Callable[[Action], None]] = {
            Op.read: lambda action: weights.read(action.stage_index, action.page),
            Op.copy: lambda action: weights.copy(action.stage_index, action.page),
            Op.free: lambda action: weights.free(action.stage_index),
            Op.attend: self._attend,
            Op.experts: self._run_experts,
            Op.fetch: self._fetch,
            Op.store: self._store,
            Op.recv: lambda action: self._peers.receive(action.turn[1]),
            Op.send: lambda action: self._peers.send(action.turn[1]),
            Op.sync: self._sync,
            Op.run: partial(self._advance, self._enter_whole_stage, ()),
            Op.pre: partial(self._advance, self._enter_stage, (NeedAttention,)),
            Op.post: partial(self._advance, self._take_attention, ()),
            Op.route: partial(self._advance, self._attention_or_stage, (NeedExperts,)),
            Op.end: partial(self._advance, lambda action: self._expert_outputs.pop(action.turn[1], None), ()),
        }

    def play(
        self, schedule: Schedule, walk: Walk, lanes: Rows[Lane], new_tokens: Rows[Rows[int] | None] | None = None
    ) -> None:
        """Runs all stages of a pass; the lanes can then sample. Actions of lanes that only other ranks have are
        skipped. `new_tokens`: per lane, the number of tokens of each sequence; None: the lane's choice. After an error
        (Interrupted, of a lane or a stream) the player is unusable: transfers may still be in flight."""
        self._lanes, self._offloaded_stages = lanes, frozenset(walk.offloaded_kv)
        try:
            self._events = [
                lane.begin_pass(new) for lane, new in zip(lanes, new_tokens or [None] * len(lanes), strict=True)
            ]
            if self._pipeline is not None:
                self._peers.begin(lanes)
            actions = schedule.cycle
            if self._last_schedule is None or self._last_schedule.prologue != schedule.prologue:
                self._streams.weights.drop()  # prefetched stages are not those that this schedule expects
                actions = (*schedule.prologue, *schedule.cycle)
            for action in actions:
                if action.lane is None or action.lane < len(lanes):
                    self._handlers[action.op](action)
            assert not any(self._events), f"lanes still wait for {self._events} after the last stage"
        except BaseException:
            self.has_failed = True
            for lane in lanes:
                lane.abandon()
            raise
        finally:
            self._lanes, self._events = (), []  # free the lanes' memory now, not at the next garbage collection
        self._last_schedule = schedule

    def _advance(self, get_answer: Callable[[Action], Answer | None], stops: Stops, action: Action) -> None:
        """Resumes a lane with its answer, if any, until it needs another stage or an event in `stops`. A stage may
        have several modules, each of which requests its weights."""
        answer = get_answer(action)
        if answer is None:
            return
        stage, lane = action.turn
        begin = self._monitor.begin_compute()
        event = self._lanes[lane].advance(answer)
        while event is not None and not isinstance(event, stops):
            if isinstance(event, NeedStage) and event.stage != stage:
                break
            event = self._lanes[lane].advance(self._answer(stage, event))
        self._events[lane] = event
        self._monitor.end_compute(stage, action, begin, len(self._lanes[lane].sequences))

    def _answer(self, stage: int, event: Event) -> Answer:
        if isinstance(event, NeedStage):
            return self._weights_of(stage)
        if isinstance(event, NeedExperts):
            return self._experts.run(stage, [event])[0]
        return self._attend_inline(stage, event)

    def _enter_stage(self, action: Action) -> Weights:
        """The weights of the stage that the lane enters. Binds its KV pages if they are offloaded."""
        if self._should_stop():
            raise Interrupted(RESUME_HINT)
        stage, lane = action.turn
        event = self._events[lane]
        if not isinstance(event, NeedStage) or event.stage != stage:
            raise ConfigError(
                f"model.path: this model's class requests {event} at '{action}': its layers do not run in order, so "
                "they cannot be streamed"
            )
        if stage in self._offloaded_stages:
            layer = self._layer(stage)
            self._lanes[lane].kv.bind(layer, self._kv.acquire(layer, lane))
        return self._weights_of(stage)

    def _enter_whole_stage(self, action: Action) -> Weights:
        """The weights of a stage that the lane runs without a stop, experts included."""
        self._experts.prefetch(action.stage_index)
        return self._enter_stage(action)

    def _take_attention(self, action: Action) -> torch.Tensor | None:
        """The result of the lane's attention, from a worker if one runs it; None if the lane waits for none."""
        stage, lane = action.turn
        event = self._events[lane]
        if not isinstance(event, NeedAttention):
            return None
        self._experts.prefetch(stage)  # this lane is the next to need experts
        pending = self._pending_attention.pop(lane, None)
        return pending.result() if pending is not None else self._attend_inline(stage, event)

    def _attention_or_stage(self, action: Action) -> Answer | None:
        """The answer that takes a lane to its router: attention, or weights if the stage has no attention stop."""
        if self._events[action.turn[1]] == NeedStage(action.stage_index):
            return self._enter_whole_stage(action)
        return self._take_attention(action)

    def _attend(self, action: Action) -> None:
        stage, lane = action.turn
        event = self._events[lane]
        if isinstance(event, NeedAttention) and event.is_decode:  # some layers have no attention
            assert self._streams.workers is not None, f"'{action}': there are no CPU workers"
            num_rows = len(self._lanes[lane].sequences)
            compute = self._monitor.timed(stage, action, event.compute, num_rows)
            self._pending_attention[lane] = self._streams.workers.submit(compute)

    def _attend_inline(self, stage: int, event: NeedAttention) -> torch.Tensor:
        begin = self._monitor.begin_compute()
        out = event.compute()
        self._monitor.end_attention(stage, begin)
        return out

    def _run_experts(self, action: Action) -> None:
        waiting = [(lane, event) for lane, event in enumerate(self._events) if isinstance(event, NeedExperts)]
        if waiting:
            begin = self._monitor.begin_compute()
            answers = self._experts.run(action.stage_index, [event for _, event in waiting])
            num_rows = sum(len(self._lanes[lane].sequences) for lane, _ in waiting)
            self._monitor.end_compute(action.stage_index, action, begin, num_rows)
            self._expert_outputs = {lane: answer for (lane, _), answer in zip(waiting, answers, strict=True)}

    def _fetch(self, action: Action) -> None:
        stage, lane = action.turn
        self._kv.fetch(self._layer(stage), lane, self._lanes[lane].kv.pages)

    def _store(self, action: Action) -> None:
        stage, lane = action.turn
        layer = self._layer(stage)
        self._lanes[lane].kv.unbind(layer)
        self._kv.store(layer, lane, self._lanes[lane].kv.dirty_pages)

    def _sync(self, action: Action) -> None:
        self._streams.weights.sync()
        if self._streams.kv is not None:
            self._streams.kv.sync()

    @property
    def _kv(self) -> KVStream:
        assert self._streams.kv is not None, "KV is offloaded without a stream"
        return self._streams.kv

    @property
    def _peers(self) -> PipelinePeers:
        assert self._pipeline is not None, "only pipeline ranks exchange hidden states"
        return self._pipeline

    def _layer(self, stage: int) -> int:
        return stage - self._first_layer
