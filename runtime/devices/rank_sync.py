"""Synchronization of ranks between passes: lanes of the next pass, finished sequences, and stopping.

A rank that stops sends STOPPING in the next exchange, and the others answer with STOPPING until all have. Within a
pass, `Ranks.stop` wakes ranks that wait for bytes.

Ranks that split a model run the same passes of the same rows. With tensor parallelism all ranks sample the same tokens;
in a pipeline the last rank samples and broadcasts them.
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

MINIMUM = "minimum"


class RankSync:
    """Synchronizes the ranks of one session. All ranks must make the same calls in the same order, except `stop` and
    `all_states`, which the others answer within their own calls. The session sets `rows` (this rank's unfinished
    sequences) and `states` (their states, once started)."""

    def __init__(self, ranks: Ranks, should_stop: Callable[[], bool]):
        self.ranks, self._local_should_stop = ranks, should_stop
        self.rows: Callable[[], Mapping[int, Running]] = dict
        self.states: Callable[[], Mapping[int, SequenceState]] = dict
        self._peer_states: dict[int, SequenceState] = {}  # of other ranks, from the last exchange
        self._has_stopped = False

    def should_stop(self) -> bool:
        """True if any rank was asked to stop."""
        return self.ranks.is_stopping or self._local_should_stop()

    def agree_on_lanes(self, num_lanes: int, phase: Phase) -> tuple[int, Phase]:
        """Agrees on the next pass: the most lanes of any rank, and the common phase or `mixed`. Raises Interrupted."""
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
        """Exchanges a pass's counts and finished sequences. Returns the totals of all ranks, ordered by rank."""
        values = asdict(counts) if counts is not None else None
        message = {KIND: ENDED, "counts": values, "finished": encode_completions(finished)}
        replies = [each for each in self.ranks.exchange(message) if each[KIND] == ENDED]
        completions = [pair for each in replies for pair in decode_completions(each["finished"], requests)]
        for index, _ in completions:
            self._peer_states.pop(index, None)
        return PassCounts.total(PassCounts(**each["counts"]) for each in replies if each["counts"]), completions

    def all_states(self) -> dict[int, SequenceState]:
        """Sequence states of all ranks, for rank 0 between passes or after the last one. Uses the last known states of
        ranks that have ended."""
        try:
            if not self._has_stopped and not self.ranks.is_stopping:
                self._exchange({KIND: STATES})
                self._store_states(self.ranks.exchange(self._own_states()))
        except Interrupted:
            self.stop()
        return {**self._peer_states, **self.states()}

    def stop(self) -> None:
        """Stops all live ranks and waits until they have."""
        self.ranks.stop()
        while not self._has_stopped:
            try:
                replies = self.ranks.exchange({**self._own_states(), KIND: STOPPING})
            except Interrupted:  # a rank has ended
                self._has_stopped = True
                return
            self._has_stopped = all(each.get(KIND) == STOPPING for each in replies)
            self._store_states([each for each in replies if each.get(KIND) == STOPPING])

    def abort_pass(self) -> None:
        """Stops after an error within a pass, while other ranks may wait for this one."""
        self.stop()

    def _exchange(self, message: Message) -> list[Message]:
        """Exchanges messages. Raises Interrupted if a rank is stopping, and PeerEnded."""
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
    """Synchronizes ranks that split a model. They stop only between passes, since within a pass each waits for
    others."""

    def should_stop(self) -> bool:
        return False

    def abort_pass(self) -> None:
        """Sends nothing: the others wait within the pass and notice that this process ends."""
        self._has_stopped = True

    def min_over_ranks(self, counts: Sequence[int | None]) -> list[int | None]:
        """Minimum of each count over all ranks; None (the policy's value) if any rank has None."""
        replies = [reply[MINIMUM] for reply in self.ranks.exchange({KIND: MINIMUM, MINIMUM: counts})]
        return [None if None in values else min(values) for values in zip(*replies, strict=True)]


class PassSync(SyncBetweenPasses):
    """Synchronizes tensor-parallel ranks; checks that all run the same pass with the same tokens."""

    def agree_on_lanes(self, num_lanes: int, phase: Phase) -> tuple[int, Phase]:
        """Returns its arguments. Raises PeerEnded, Interrupted if a rank was asked to stop, and ConfigError if ranks
        have sampled different tokens."""
        # Checksum of the last tokens of unfinished rows.
        last = [(i, len(each.generated), each.generated[-1]) for i, each in self.rows().items() if each.generated]
        checksum = zlib.crc32(repr(last).encode())
        own = {KIND: LANES, "lanes": num_lanes, "phase": phase.value, "checksum": checksum}
        replies = self.ranks.exchange({**own, STOPPING: self._local_should_stop()})
        if any(each[STOPPING] for each in replies):
            self._has_stopped = True
            raise Interrupted(STOPPED)
        first = {**replies[0], STOPPING: False}
        differing = [rank for rank, reply in enumerate(replies) if {**reply, STOPPING: False} != first]
        if differing:
            self._has_stopped = True
            raise ConfigError(
                f"devices=tensor: rank {differing[0]} has sampled other tokens than rank 0: use the same kind "
                "of processor and number of threads"
            )
        return num_lanes, phase

    def stop(self) -> None:
        """Stops the others before their next pass, unless all stop already."""
        if not self._has_stopped:
            self._has_stopped = True
            self.ranks.exchange({KIND: LANES, STOPPING: True})

    def all_states(self) -> dict[int, SequenceState]:
        """This rank's states, which are those of all ranks."""
        return dict(self.states())


class PipelineSync(SyncBetweenPasses):
    """Synchronizes pipeline ranks, only for stopping. The last rank samples, so it reports all states."""

    def __init__(self, link: PipelineLink, local_should_stop: Callable[[], bool]):
        super().__init__(link.ranks, local_should_stop)
        self._link = link

    def agree_on_lanes(self, num_lanes: int, phase: Phase) -> tuple[int, Phase]:
        """Returns its arguments. Raises Interrupted if a rank was asked to stop, and PeerEnded."""
        if self._has_stopped:
            raise Interrupted(STOPPED)
        while self._exchange_or_stop({KIND: LANES, STOPPING: self._local_should_stop()})[0][KIND] == STATES:
            self._store_states(self.ranks.exchange(self._own_states()))
        return num_lanes, phase

    def all_states(self) -> dict[int, SequenceState]:
        """Sequence states from the last rank, for rank 0 between passes or after the last one. Uses the last known
        states if that rank no longer answers."""
        try:
            if not self._has_stopped:
                self._exchange_or_stop({KIND: STATES})
                self._store_states(self.ranks.exchange(self._own_states()))
        except Interrupted:
            self._has_stopped = True
        return {index: self._peer_states[index] for index in self.states() if index in self._peer_states}

    def stop(self) -> None:
        """Stops the others before their next pass, unless all stop already."""
        try:
            if not self._has_stopped:
                self._exchange_or_stop({KIND: LANES, STOPPING: True})
        except Interrupted:
            self._has_stopped = True

    def _exchange_or_stop(self, message: Message) -> list[Message]:
        """Exchanges messages. If a rank stops, stores the last rank's states and raises Interrupted."""
        replies = self.ranks.exchange(message)
        if any(each.get(STOPPING) for each in replies):
            self._has_stopped = True
            self._store_states(self.ranks.exchange(self._own_states()))
            raise Interrupted(STOPPED)
        return replies

    def _own_states(self) -> Message:
        return super()._own_states() if self._link.is_last else {KIND: STATES}

    def _store_states(self, replies: list[Message]) -> None:
        self._peer_states = decode_states(replies[-1]["states"])
