"""What an action of a schedule does on lanes, where only the engine's own parts are asked."""

from typing import cast

from runtime.engine.experts import BatchedExperts
from runtime.engine.monitor import PassMonitor
from runtime.engine.player import Player
from runtime.engine.setup import Streams
from runtime.plan.schedule.actions import Action, Op
from runtime.plan.schedule.schedule import Schedule
from runtime.plan.schedule.walk import Walk
from runtime.stream.kv import KVStream
from runtime.stream.weights import WeightStream

WALK = Walk(num_stages=2, streamed=(), num_slots=1)


class Waiting:
    def __init__(self) -> None:
        self.num_syncs = 0

    def drop(self) -> None: ...

    def sync(self) -> None:
        self.num_syncs += 1


def test_a_barrier_waits_for_weights_and_for_keys_and_values() -> None:
    weights, kv = Waiting(), Waiting()
    for travelling, expected in ((None, (1, 0)), (kv, (2, 1))):
        streams = Streams(
            weights=cast(WeightStream, weights),
            experts=None,
            kv=cast(KVStream | None, travelling),
            exchange=None,
            round_trips=None,
            workers=None,
        )
        player = Player(
            streams,
            lambda stage: {},
            cast(BatchedExperts, None),
            cast(PassMonitor, None),
            lambda: False,
            first_layer=1,
        )
        player.play(Schedule(prologue=(), cycle=(Action(Op.sync, None),)), WALK, [])
        assert (weights.num_syncs, kv.num_syncs) == expected
