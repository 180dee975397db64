"""Synchronization of ranks (processes) between passes: number of lanes (micro-batches) in the next pass, finished
sequences, and stopping.

A rank that stops sends STOPPING in the next exchange of messages. Other ranks then also send STOPPING, until all have
sent it. Within a pass, `Ranks.stop` wakes ranks that wait for weights.

Ranks that split a model run the same passes of the same sequences. With tensor parallelism all ranks sample the same
tokens. In a pipeline the last rank samples and broadcasts them.
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
    """Synchronizes the ranks of one session. All ranks must make the same calls in the same order, with two exceptions:
    to `stop` and `all_states` of one rank, other ranks respond within their own calls.

    The session sets two functions, which return dicts by request index: `running`, this rank's unfinished sequences,
    and `states`, the states of those that have started."""

    def __init__(self, ranks: Ranks, should_stop: Callable[[], bool]):
        self.ranks, self._local_should_stop = ranks, should_stop
        self.running: Callable[[], Mapping[int, Running]] = dict
        self.states: Callable[[], Mapping[int, SequenceState]] = dict
        self._peer_states: dict[int, SequenceState] = {}  # of other ranks, from the last exchange
        self._has_stopped = False

    def should_stop(self) -> bool:
        """True if any rank was asked to stop."""
        return self.ranks.is_stopping or self._local_should_stop()

    def agree_on_lanes(self, num_lanes: int, phase: Phase) -> tuple[int, Phase]:
        """Agrees on the next pass: the largest number of lanes of any rank, and the phase, which is `mixed` if ranks
        have different ones. Raises Interrupted if any rank stops."""
        while True:
            if self.should_stop():
                raise Interrupted(STOPPED)
            replies = self._exchange({KIND: LANES, "lanes": num_lanes, "phase": phase.value})
            if replies[0][KIND] == LANES:
                break
            self._exchange(self._own_states())  # rank 0 asked for states (`all_states`)
        phases = {each["phase"] for each in replies if each["lanes"]}
        agreed = Phase(*phases) if len(phases) == 1 else Phase.mixed
        return max(each["lanes"] for each in replies), agreed

    def exchange_results(
        self, counts: PassCounts | None, finished: Finished, requests: Sequence[Request]
    ) -> tuple[PassCounts, Finished]:
        """Exchanges a pass's counts and finished sequences. Returns the counts summed over ranks, and the finished
        sequences of all ranks."""
        values = asdict(counts) if counts is not None else None
        message = {KIND: ENDED, "counts": values, "finished": encode_completions(finished)}
        replies = [each for each in self.ranks.exchange(message) if each[KIND] == ENDED]
        completions = [pair for each in replies for pair in decode_completions(each["finished"], requests)]
        for index, _ in completions:
            self._peer_states.pop(index, None)
        return PassCounts.total(PassCounts(**each["counts"]) for each in replies if each["counts"]), completions

    def all_states(self) -> dict[int, SequenceState]:
        """Sequence states of all ranks. Called by rank 0, between passes or after the last one. For ranks that have
        ended, returns their last known states."""
        try:
            if not self._has_stopped and not self.ranks.is_stopping:
                self._exchange({KIND: STATES})
                self._store_states(self.ranks.exchange(self._own_states()))
        except Interrupted:
            self.stop()
        return {**self._peer_states, **self.states()}

    def stop(self) -> None:
        """Stops all live ranks, and waits until they have stopped."""
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
        """Stops all ranks after an error within a pass, in which other ranks may wait for this one."""
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
    """Synchronizes ranks that split a model. They stop only between passes, since within a pass each rank waits for
    others."""

    def should_stop(self) -> bool:
        return False

    def abort_pass(self) -> None:
        """Sends nothing: other ranks wait within the pass, and notice when this process ends."""
        self._has_stopped = True

    def min_over_ranks(self, counts: Sequence[int | None]) -> list[int | None]:
        """Minimum of each count over all ranks; None, which means the policy's value, if any rank has None."""
        replies = [reply[MINIMUM] for reply in self.ranks.exchange({KIND: MINIMUM, MINIMUM: counts})]
        return [None if None in values else min(values) for values in zip(*replies, strict=True)]


class PassSync(SyncBetweenPasses):
    """Synchronizes tensor-parallel ranks, and checks that all run the same pass with the same tokens."""

    def agree_on_lanes(self, num_lanes: int, phase: Phase) -> tuple[int, Phase]:
        """Returns its arguments. Raises Interrupted if a rank was asked to stop, ConfigError if ranks have sampled
        different tokens, and PeerEnded."""
        # Checksum of the number of generated tokens and the last token of each unfinished sequence.
        last = [(i, len(each.generated), each.generated[-1]) for i, each in self.running().items() if each.generated]
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
        """Stops other ranks before their next pass, unless all ranks are stopping already."""
        if not self._has_stopped:
            self._has_stopped = True
            self.ranks.exchange({KIND: LANES, STOPPING: True})

    def all_states(self) -> dict[int, SequenceState]:
        """The states of this rank's sequences, which are the same on all ranks."""
        return dict(self.states())


class PipelineSync(SyncBetweenPasses):
    """Synchronizes pipeline-parallel ranks, only to stop them. The last rank samples tokens, so only it sends
    states."""

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
        """Sequence states from the last rank. Called by rank 0, between passes or after the last one. Returns the last
        known states if that rank does not respond."""
        try:
            if not self._has_stopped:
                self._exchange_or_stop({KIND: STATES})
                self._store_states(self.ranks.exchange(self._own_states()))
        except Interrupted:
            self._has_stopped = True
        return {index: self._peer_states[index] for index in self.states() if index in self._peer_states}

    def stop(self) -> None:
        """Stops other ranks before their next pass, unless all ranks are stopping already."""
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
