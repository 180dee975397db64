"""Lanes that never run dry: sequences that finish leave between passes, waiting ones enter, and a pass carries prompts
beside tokens that are decoded.

`batching/admission.py` decides, this acts. Padded lanes cannot be joined: there a micro-batch enters as a lane ends.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from ..batching.admission import AdmissionLimits, SeatState, Waiting, most_cached, plan_pass
from .engine import Engine
from .lanes.packed import PackedLane
from .records import PassRecord, Phase
from .sequence import Sequence
from .wave import run_line


class Continuous(ABC):
    """`sequences` by request index, in the order in which they enter; those that are finished already are left out."""

    def __init__(self, engine: Engine, sequences: Mapping[int, Sequence]):
        self._engine = engine
        self._sequences = sequences
        self._line = deque(sequences)

    @abstractmethod
    def run(self) -> Iterator[tuple[PassRecord, list[int]]]:
        """Until every sequence is finished; after each pass, what it came to and who has finished in it. Mutates the
        sequences."""

    def _finished(self, indices: Iterable[int]) -> list[int]:
        return [i for i in indices if self._sequences[i].finish is not None]


class ContinuousPacked(Continuous):
    """`limits.num_lanes` lanes whose sequences come and go."""

    def __init__(self, engine: Engine, sequences: Mapping[int, Sequence], limits: AdmissionLimits):
        super().__init__(engine, sequences)
        self._limits = limits
        self._lanes: list[PackedLane] = [engine.packed_lane([]) for _ in range(limits.num_lanes)]
        self._lane_of: dict[int, int] = {}  # seated requests, in the order of admission

    def run(self) -> Iterator[tuple[PassRecord, list[int]]]:
        index = 0
        try:
            while self._line or self._lane_of:
                new_tokens = self._seat()
                news = {lane: [new_tokens.get(id(s), 0) for s in lane.sequences] for lane in self._lanes}
                busy = {lane: new for lane, new in news.items() if any(new)}
                record = self._engine.run_pass(0, index, _phase(busy), list(busy), list(busy.values()))
                finished = self._finished(self._lane_of)
                for i in finished:
                    del self._lane_of[i]
                yield record, finished
                index += 1
        finally:
            for lane in self._lanes:
                lane.close()

    def _seat(self) -> dict[int, int]:
        """Moves sequences in and out; returns how many tokens each (by `id`) brings into the pass."""
        most = self._limits.num_lanes * self._limits.lane_size
        waiting = [self._waiting(i) for i in islice(self._line, most)]
        plan = plan_pass(waiting, [self._state(i) for i in self._lane_of], self._engine.num_free_pages, self._limits)
        for i in reversed(plan.preempted):
            self._lanes[self._lane_of.pop(i)].leave(self._sequences[i])
            self._line.appendleft(i)
        for i, lane in plan.admitted:
            assert self._line.popleft() == i, "requests enter in the order of the line"
            self._lanes[lane].enter(self._sequences[i])
            self._lane_of[i] = lane
        return {id(self._sequences[i]): count for i, count in plan.new_tokens.items()}

    def _waiting(self, i: int) -> Waiting:
        s = self._sequences[i]
        num_most = most_cached(len(s.request.prompt_ids), s.request.max_new_tokens)
        return Waiting(request=i, num_known=s.num_known, num_most=num_most)

    def _state(self, i: int) -> SeatState:
        s, waiting = self._sequences[i], self._waiting(i)
        return SeatState(
            request=i,
            lane=self._lane_of[i],
            num_cached=s.num_cached,
            num_known=waiting.num_known,
            num_most=waiting.num_most,
        )


class ContinuousPadded(Continuous):
    """At most `num_lanes` lanes; the next `lane_size` sequences enter as a new one when one has ended."""

    def __init__(self, engine: Engine, sequences: Mapping[int, Sequence], *, num_lanes: int, lane_size: int):
        super().__init__(engine, sequences)
        self._num_lanes, self._lane_size = num_lanes, lane_size
        self._seated: list[int] = []

    def run(self) -> Iterator[tuple[PassRecord, list[int]]]:
        for record in run_line(
            self._engine, 0, map(self._engine.lane, self._micro_batches()), num_lanes=self._num_lanes
        ):
            finished = self._finished(self._seated)
            self._seated = [i for i in self._seated if self._sequences[i].finish is None]
            yield record, finished

    def _micro_batches(self) -> Iterator[list[Sequence]]:
        while self._line:
            entering = [self._line.popleft() for _ in range(min(self._lane_size, len(self._line)))]
            self._seated += entering
            yield [self._sequences[i] for i in entering]


def _phase(lanes: Iterable[PackedLane]) -> Phase:
    is_prefilled = {sequence.is_prefilled for lane in lanes for sequence in lane.sequences}
    return Phase.mixed if len(is_prefilled) > 1 else Phase.decode if True in is_prefilled else Phase.prefill
