"""What ranks agree on between passes: how many lanes the next one takes, who has ended what, and when all of them stop.

Whoever is stopped says so in the next exchange, whatever the others exchange there; each then says the same, until all
have. Within a pass `Ranks.stop` tells those that wait for bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from ..engine.records import PassCounts, Phase
from ..errors import Interrupted
from ..ranks.ranks import STOPPED, Message, Ranks
from ..sequences.sequence import Request, Unfinished
from ..sequences.sequence import Sequence as Running
from .messages import Finished, read_completions, read_states, written_completions, written_states

KIND, LANES, STATES, ENDED, STOPPING = "kind", "lanes", "states", "ended", "stopping"


class Agreement:
    """This rank's part in the agreements of one session. All ranks make the same calls in the same order, but for
    `stop` and `all_states`, which the others answer from within theirs. `rows`, to be set, gives this rank's that are
    not finished, and `states` what those of them have come to that are begun."""

    def __init__(self, ranks: Ranks, should_stop: Callable[[], bool]):
        self.ranks, self._asked_to_stop = ranks, should_stop
        self.rows: Callable[[], Mapping[int, Running]] = dict
        self.states: Callable[[], Mapping[int, Unfinished]] = dict
        self._known: dict[int, Unfinished] = {}  # of other ranks, when they were last asked
        self._has_stopped = False

    def should_stop(self) -> bool:
        """Whether this rank, or any other, was asked to stop."""
        return self.ranks.is_stopping or self._asked_to_stop()

    def lanes(self, num_lanes: int, phase: Phase) -> tuple[int, Phase]:
        """The most lanes that any rank has in the next pass, and the phase of all that have any. Raises Interrupted."""
        while True:
            if self.should_stop():
                raise Interrupted(STOPPED)
            met = self._exchange({KIND: LANES, "lanes": num_lanes, "phase": phase.value})
            if met[0][KIND] == LANES:
                break
            self._exchange(self._own_states())
        phases = {each["phase"] for each in met if each["lanes"]}
        agreed = Phase(*phases) if len(phases) == 1 else Phase.mixed
        return max(each["lanes"] for each in met), agreed

    def ended(
        self, counts: PassCounts | None, finished: Finished, requests: Sequence[Request]
    ) -> tuple[PassCounts, Finished]:
        """What a pass came to on all ranks, given this one's: its counts, and what has finished in it, by rank."""
        values = asdict(counts) if counts is not None else None
        message = {KIND: ENDED, "counts": values, "finished": written_completions(finished)}
        met = [each for each in self.ranks.exchange(message) if each[KIND] == ENDED]
        found = [pair for each in met for pair in read_completions(each["finished"], requests)]
        for place, _ in found:
            self._known.pop(place, None)
        return PassCounts.total(PassCounts(**each["counts"]) for each in met if each["counts"]), found

    def all_states(self) -> dict[int, Unfinished]:
        """What rows of all ranks have come to; of rank 0 alone, between two passes or behind the last one. Where others
        cannot be asked any more, what they said last counts."""
        try:
            if not self._has_stopped and not self.ranks.is_stopping:
                self._exchange({KIND: STATES})
                self._keep(self.ranks.exchange(self._own_states()))
        except Interrupted:
            self.stop()
        return {**self._known, **self.states()}

    def stop(self) -> None:
        """Has all ranks stop, and waits until they have, as far as they are there."""
        self.ranks.stop()
        while not self._has_stopped:
            try:
                met = self.ranks.exchange({**self._own_states(), KIND: STOPPING})
            except Interrupted:  # one of them has ended
                self._has_stopped = True
                return
            self._has_stopped = all(each.get(KIND) == STOPPING for each in met)
            self._keep([each for each in met if each.get(KIND) == STOPPING])

    def lose_pass(self) -> None:
        """This rank cannot go on in the middle of a pass, in which others wait for it."""
        self.stop()

    def _exchange(self, message: Message) -> list[Message]:
        """Raises Interrupted where another rank is stopping, and PeerEnded."""
        met = self.ranks.exchange(message)
        if any(each.get(KIND) == STOPPING for each in met):
            raise Interrupted(STOPPED)
        return met

    def _own_states(self) -> Message:
        return {KIND: STATES, "states": written_states(self.states())}

    def _keep(self, met: list[Message]) -> None:
        for rank, each in enumerate(met):
            if rank != self.ranks.rank:
                self._known.update(read_states(each["states"]))
