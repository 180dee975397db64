"""What ranks agree on between passes: how many lanes the next one takes, who has ended what, and when all of them stop.

Whoever is stopped says so in the next exchange, whatever the others exchange there; each then says the same, until all
have. Within a pass `Ranks.stop` tells those that wait for bytes.

Ranks that divide a model all play the same passes of the same rows. Those that compute each token together have a part
of every layer and some of the heads, and come to the same tokens; of those that divide the layers the last one draws
them, and all are told. Either way rank 0 alone need write them.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from ..engine.records import PassCounts, Phase
from ..errors import ConfigError, Interrupted
from ..ranks.collectives import PipelineLink
from ..ranks.ranks import STOPPED, Message, Ranks
from ..sequences.sequence import Request, SequenceState
from ..sequences.sequence import Sequence as Running
from .messages import (
    ENDED,
    KIND,
    LANES,
    STATES,
    STOPPING,
    Finished,
    decode_completions,
    decode_states,
    encode_completions,
    encode_states,
)

LEAST = "least"


class RankSync:
    """This rank's part in the agreements of one session. All ranks make the same calls in the same order, but for
    `stop` and `all_states`, which the others answer from within theirs. `rows`, to be set, gives this rank's that are
    not finished, and `states` what those of them have come to that are begun."""

    def __init__(self, ranks: Ranks, should_stop: Callable[[], bool]):
        self.ranks, self._local_should_stop = ranks, should_stop
        self.rows: Callable[[], Mapping[int, Running]] = dict
        self.states: Callable[[], Mapping[int, SequenceState]] = dict
        self._peer_states: dict[int, SequenceState] = {}  # of other ranks, when they were last asked
        self._has_stopped = False

    def should_stop(self) -> bool:
        """Whether this rank, or any other, was asked to stop."""
        return self.ranks.is_stopping or self._local_should_stop()

    def agree_on_lanes(self, num_lanes: int, phase: Phase) -> tuple[int, Phase]:
        """The most lanes that any rank has in the next pass, and the phase of all that have any. Raises Interrupted."""
        while True:
            if self.should_stop():
                raise Interrupted(STOPPED)
            replies = self._exchange({KIND: LANES, "lanes": num_lanes, "phase": phase.value})
            if replies[0][KIND] == LANES:
                break
            self._exchange(self._own_states())
        phases = {each["phase"] for each in replies if each["lanes"]}
        agreed = Phase(*phases) if len(phases) == 1 else Phase.mixed
        return max(each["lanes"] for each in replies), agreed

    def exchange_results(
        self, counts: PassCounts | None, finished: Finished, requests: Sequence[Request]
    ) -> tuple[PassCounts, Finished]:
        """What a pass came to on all ranks, given this one's: its counts, and what has finished in it, by rank."""
        values = asdict(counts) if counts is not None else None
        message = {KIND: ENDED, "counts": values, "finished": encode_completions(finished)}
        replies = [each for each in self.ranks.exchange(message) if each[KIND] == ENDED]
        found = [pair for each in replies for pair in decode_completions(each["finished"], requests)]
        for place, _ in found:
            self._peer_states.pop(place, None)
        return PassCounts.total(PassCounts(**each["counts"]) for each in replies if each["counts"]), found

    def all_states(self) -> dict[int, SequenceState]:
        """What rows of all ranks have come to; of rank 0 alone, between two passes or behind the last one. Where others
        cannot be asked any more, what they said last counts."""
        try:
            if not self._has_stopped and not self.ranks.is_stopping:
                self._exchange({KIND: STATES})
                self._store_states(self.ranks.exchange(self._own_states()))
        except Interrupted:
            self.stop()
        return {**self._peer_states, **self.states()}

    def stop(self) -> None:
        """Has all ranks stop, and waits until they have, as far as they are there."""
        self.ranks.stop()
        while not self._has_stopped:
            try:
                replies = self.ranks.exchange({**self._own_states(), KIND: STOPPING})
            except Interrupted:  # one of them has ended
                self._has_stopped = True
                return
            self._has_stopped = all(each.get(KIND) == STOPPING for each in replies)
            self._store_states([each for each in replies if each.get(KIND) == STOPPING])

    def abort_pass(self) -> None:
        """This rank cannot go on in the middle of a pass, in which others wait for it."""
        self.stop()

    def _exchange(self, message: Message) -> list[Message]:
        """Raises Interrupted where another rank is stopping, and PeerEnded."""
        replies = self.ranks.exchange(message)
        if any(each.get(KIND) == STOPPING for each in replies):
            raise Interrupted(STOPPED)
        return replies

    def _own_states(self) -> Message:
        return {KIND: STATES, "states": encode_states(self.states())}

    def _store_states(self, replies: list[Message]) -> None:
        for rank, each in enumerate(replies):
            if rank != self.ranks.rank:
                self._peer_states.update(decode_states(each["states"]))


class SyncBetweenPasses(RankSync):
    """What such ranks agree on before each pass. Within one they go on, as each waits for others."""

    def should_stop(self) -> bool:
        return False

    def abort_pass(self) -> None:
        """Others wait within the pass and can be told nothing, but see the end of this rank."""
        self._has_stopped = True

    def min_over_ranks(self, counts: Sequence[int | None]) -> list[int | None]:
        """What all ranks have of each of these, given what this one has; None: as the policy says."""
        replies = [each[LEAST] for each in self.ranks.exchange({KIND: LEAST, LEAST: counts})]
        return [min(each) if None not in each else None for each in zip(*replies, strict=True)]


class PassSync(SyncBetweenPasses):
    """That the next pass is the same one, and that none of them is to stop."""

    def agree_on_lanes(self, num_lanes: int, phase: Phase) -> tuple[int, Phase]:
        """What was asked for. Raises Interrupted where a rank was asked to stop, PeerEnded where one has ended, and
        ConfigError where one has drawn other tokens."""
        # A sum over the tokens of rows that go on.
        last = [(i, len(each.generated), each.generated[-1]) for i, each in self.rows().items() if each.generated]
        drawn = zlib.crc32(repr(last).encode())
        own = {KIND: LANES, "lanes": num_lanes, "phase": phase.value, "drawn": drawn}
        replies = self.ranks.exchange({**own, STOPPING: self._local_should_stop()})
        if any(each[STOPPING] for each in replies):
            self._has_stopped = True
            raise Interrupted(STOPPED)
        odd = [
            rank for rank, each in enumerate(replies) if {**each, STOPPING: False} != {**replies[0], STOPPING: False}
        ]
        if odd:
            self._has_stopped = True
            raise ConfigError(
                f"devices=tensor: rank {odd[0]} has come to other tokens than rank 0: all ranks need processors of "
                "one kind, and as many threads"
            )
        return num_lanes, phase

    def stop(self) -> None:
        """Has the others stop before their next pass, unless all are about to."""
        if not self._has_stopped:
            self._has_stopped = True
            self.ranks.exchange({KIND: LANES, STOPPING: True})

    def all_states(self) -> dict[int, SequenceState]:
        """What this rank's rows have come to, as all others' have."""
        return dict(self.states())


class PipelineSync(SyncBetweenPasses):
    """Whether one of them is to stop. How far rows have come the last rank says, which has the generators that draw
    their tokens."""

    def __init__(self, line: PipelineLink, local_should_stop: Callable[[], bool]):
        super().__init__(line.ranks, local_should_stop)
        self._line = line

    def agree_on_lanes(self, num_lanes: int, phase: Phase) -> tuple[int, Phase]:
        """What was asked for. Raises Interrupted where a rank was asked to stop, and PeerEnded."""
        if self._has_stopped:
            raise Interrupted(STOPPED)
        while self._exchange_or_stop({KIND: LANES, STOPPING: self._local_should_stop()})[0][KIND] == STATES:
            self._store_states(self.ranks.exchange(self._own_states()))
        return num_lanes, phase

    def all_states(self) -> dict[int, SequenceState]:
        """What the last rank says; of rank 0 alone, between two passes or behind the last one. Where it cannot be asked
        any more, what it said last counts."""
        try:
            if not self._has_stopped:
                self._exchange_or_stop({KIND: STATES})
                self._store_states(self.ranks.exchange(self._own_states()))
        except Interrupted:
            self._has_stopped = True
        return {place: self._peer_states[place] for place in self.states() if place in self._peer_states}

    def stop(self) -> None:
        """Has the others stop before their next pass, unless all are about to."""
        try:
            if not self._has_stopped:
                self._exchange_or_stop({KIND: LANES, STOPPING: True})
        except Interrupted:
            self._has_stopped = True

    def _exchange_or_stop(self, message: Message) -> list[Message]:
        """Raises Interrupted where a rank stops, and has then heard the last one; and PeerEnded."""
        replies = self.ranks.exchange(message)
        if any(each.get(STOPPING) for each in replies):
            self._has_stopped = True
            self._store_states(self.ranks.exchange(self._own_states()))
            raise Interrupted(STOPPED)
        return replies

    def _own_states(self) -> Message:
        return super()._own_states() if self._line.is_last else {KIND: STATES}

    def _store_states(self, replies: list[Message]) -> None:
        self._peer_states = decode_states(replies[-1]["states"])
