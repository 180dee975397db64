"""Sequences that give way together go on in the order in which they had entered."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import cast

import pytest

from runtime.batching.admission import AdmissionLimits, PassPlan, SlotState, Waiting
from runtime.engine import batcher
from runtime.engine.batcher import ContinuousBatcher
from runtime.engine.lanes.factory import LaneFactory
from runtime.sequences.sequence import FinishReason, Request, Sequence

LIMITS = AdmissionLimits(num_lanes=1, lane_size=5, lane_tokens=8, page_tokens=4)


@dataclass(eq=False)
class Lane:
    sequences: list[Sequence] = field(default_factory=list)

    def enter(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)

    def close(self) -> None:
        pass


class Lanes:
    num_free_pages = 0

    def packed(self, sequences: Rows[Sequence]) -> Lane:
        return Lane(list(sequences))


def test_the_first_that_gave_way_is_the_first_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [Sequence(request=Request(id=str(i), prompt_ids=(1,), max_new_tokens=4)) for i in range(6)]
    lines: list[list[int]] = []
    plans = iter(
        [
            PassPlan(preempted=(), admitted=tuple((i, 0) for i in range(5)), new_tokens={0: 1}),
            PassPlan(preempted=(2, 3, 4), admitted=(), new_tokens={0: 1}),
            PassPlan(preempted=(), admitted=((2, 0), (3, 0), (4, 0), (5, 0)), new_tokens={0: 1}),
        ]
    )

    def plan_pass(
        waiting: Rows[Waiting], slots: Rows[SlotState], free: int, limits: AdmissionLimits, held: object
    ) -> PassPlan:
        lines.append([each.request for each in waiting])
        return next(plans)

    monkeypatch.setattr(batcher, "plan_pass", plan_pass)
    batches = ContinuousBatcher(cast(LaneFactory, Lanes()), dict(enumerate(sequences)), LIMITS)
    for _ in range(3):  # passes end no sequence, but for the last pass, which ends all
        last = batches.next_batch()
    assert lines == [[0, 1, 2, 3, 4], [5], [2, 3, 4, 5]]
    assert last is not None
    assert [s.request.id for lane in last.lanes for s in lane.sequences] == ["0", "1", "2", "3", "4", "5"]
    for sequence in sequences:
        sequence.finish = FinishReason.length
    assert batches.next_batch() is None
