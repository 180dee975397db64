"""Sequences that give way together go on in the order in which they had entered."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import cast

import pytest

from runtime.batching.admission import AdmissionLimits, PassPlan, SeatState, Waiting
from runtime.engine import continuous
from runtime.engine.continuous import ContinuousPacked
from runtime.engine.engine import Engine
from runtime.engine.sequence import FinishReason, Request, Sequence

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


class AnEngine:
    """Its passes end no sequence, but for the last pass, which ends all."""

    num_free_pages = 0

    def __init__(self, sequences: Rows[Sequence], num_passes: int):
        self._sequences, self._left = sequences, num_passes

    def packed_lane(self, sequences: Rows[Sequence]) -> Lane:
        return Lane(list(sequences))

    def run_pass(self, *_: object) -> None:
        self._left -= 1
        for sequence in self._sequences if not self._left else []:
            sequence.finish = FinishReason.length


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

    def plan_pass(waiting: Rows[Waiting], seats: Rows[SeatState], free: int, limits: AdmissionLimits) -> PassPlan:
        lines.append([each.request for each in waiting])
        return next(plans)

    monkeypatch.setattr(continuous, "plan_pass", plan_pass)
    engine = cast(Engine, AnEngine(sequences, num_passes=3))
    passes = list(ContinuousPacked(engine, dict(enumerate(sequences)), LIMITS).run())
    assert lines == [[0, 1, 2, 3, 4], [5], [2, 3, 4, 5]]
    assert passes[-1][1] == [0, 1, 2, 3, 4, 5]
