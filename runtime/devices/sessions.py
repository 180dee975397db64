"""Sessions of several ranks (processes). Rank 0 announces a block (wave) or a stream of requests. Each rank computes
its part of the requests, and all ranks get all results. All run passes until no rank has unfinished requests.

A wave starts all requests of a block together; a stream starts requests as others end. Requests are given by their
index in `requests`.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

from ..batching.balance import Block
from ..engine.batcher import Batcher
from ..engine.engine import Engine
from ..engine.records import PassCounts
from ..engine.session import LaneSlots, OnPass, Session, ignore_pass
from ..errors import Interrupted, PeerEnded
from ..model.loading import LoadedModel
from ..plan.planner import RunPlan
from ..sequences.reasoning import Reasoning
from ..sequences.sequence import Completion, Request, SequenceState
from ..sequences.sequence import Sequence as Running
from .messages import KIND, Finished, decode_states, encode_states, num_admitting_ranks
from .rank_sync import RankSync, SyncBetweenPasses

WAVE, STREAM, CLOSED = "wave", "stream", "closed"  # kinds of messages within a session


class RankSession(Session):
    """Session that splits requests among ranks. Rank 0 calls `wave` and `stream`, other ranks call `follow`. A pass
    record has the token counts of all ranks, but the times and bytes of this rank."""

    def __init__(
        self,
        model: LoadedModel,
        engine: Engine,
        plan: RunPlan,
        *,
        opening_seconds: float,
        reasoning: Reasoning | None,
        rank_sync: RankSync,
    ):
        super().__init__(model, engine, plan, plan.policy, opening_seconds=opening_seconds, reasoning=reasoning)
        self._rank_sync, self._ranks = rank_sync, rank_sync.ranks
        self._requests: Sequence[Request] = ()
        rank_sync.running, rank_sync.states = lambda: self._active, super().snapshot

    def wave(
        self,
        block: Block,
        remaining: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, SequenceState],
        on_pass: OnPass = ignore_pass,
    ) -> Generator[tuple[int, Completion]]:
        """Announces the block to other ranks, then runs this rank's part of it."""
        states = encode_states({i: unfinished[i] for i in remaining if i in unfinished})
        self._ranks.broadcast({KIND: WAVE, "block": block.index, "left": list(remaining), "states": states})
        return self._run_block(block, remaining, requests, unfinished, on_pass)

    def stream(
        self,
        order: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, SequenceState],
        on_pass: OnPass = ignore_pass,
    ) -> Generator[tuple[int, Completion]]:
        """Announces the requests to other ranks, then runs this rank's part of them."""
        states = encode_states({i: unfinished[i] for i in order if i in unfinished})
        self._ranks.broadcast({KIND: STREAM, "order": list(order), "states": states})
        return self._run_stream(order, requests, unfinished, on_pass)

    def follow(self, requests: Sequence[Request]) -> Generator[tuple[int, Completion]]:
        """Runs the blocks and streams that rank 0 announces, until rank 0 closes the session. Yields the results of all
        ranks: (index in `requests`, completion)."""
        blocks = {block.index: block for block in self._plan.blocks}
        while (message := self._ranks.receive())[KIND] != CLOSED:
            unfinished = decode_states(message["states"])
            if message[KIND] == WAVE:
                yield from self._run_block(blocks[message["block"]], message["left"], requests, unfinished, ignore_pass)
            else:
                yield from self._run_stream(message["order"], requests, unfinished, ignore_pass)

    def announce_close(self) -> None:
        """Makes the other ranks close their sessions."""
        self._ranks.broadcast({KIND: CLOSED})

    def snapshot(self) -> dict[int, SequenceState]:
        return self._rank_sync.all_states()

    def _run_block(
        self,
        block: Block,
        remaining: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, SequenceState],
        on_pass: OnPass,
    ) -> Generator[tuple[int, Completion]]:
        self._requests = requests
        return super().wave(*self._own_block(block, remaining), requests, unfinished, on_pass)

    def _run_stream(
        self,
        order: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, SequenceState],
        on_pass: OnPass,
    ) -> Generator[tuple[int, Completion]]:
        self._requests = requests
        return super().stream(self._own_requests(order), requests, unfinished, on_pass)

    def _own_block(self, block: Block, remaining: Sequence[int]) -> tuple[Block, Sequence[int]]:
        """This rank's part of a block's remaining requests: every N-th of each micro-batch, for N ranks."""
        remaining_set = frozenset(remaining)
        micro_batches = [[i for i in micro_batch if i in remaining_set] for micro_batch in block.micro_batches]
        parts = [tuple(micro_batch[self._ranks.rank :: self._ranks.size]) for micro_batch in micro_batches]
        own = Block(index=block.index, micro_batches=tuple(part for part in parts if part))
        return own, own.members

    def _own_requests(self, order: Sequence[int]) -> Sequence[int]:
        """This rank's part of a stream: every N-th request for N admitting ranks; none if this rank admits none."""
        rank, count = self._ranks.rank, self._num_admitting
        return order[rank::count] if rank < count else ()

    def _lane_slots(self) -> LaneSlots:
        return super()._lane_slots().share(self._num_admitting, self._plan.placement.kv.num_pages)

    @property
    def _num_admitting(self) -> int:
        """Number of ranks that compute requests of a stream."""
        return num_admitting_ranks(self._plan, self._requests, self._ranks.size)

    def _generate(self, batcher: Batcher, on_pass: OnPass) -> Generator[tuple[int, Completion]]:
        """Runs passes until no rank has unfinished requests. Yields the results of all ranks after each pass. After an
        error or if the caller stops, stops all ranks."""
        try:
            yield from self._exchange_results(None)[1]  # sequences that finished without a pass
            with batcher:
                while True:
                    try:
                        record = self._engine.step(batcher)
                    except Interrupted:
                        raise
                    except Exception:
                        self._rank_sync.abort_pass()
                        raise
                    if record is None:
                        break
                    counts, finished = self._exchange_results(record.counts)
                    yield from finished
                    on_pass(replace(record, counts=counts))
        except PeerEnded:
            raise
        except (Interrupted, GeneratorExit):
            self._rank_sync.stop()
            raise

    def _exchange_results(self, counts: PassCounts | None) -> tuple[PassCounts, Finished]:
        return self._rank_sync.exchange_results(counts, self._pop_finished(), self._requests)


class SameRowsSession(RankSession):
    """Session in which every rank computes all requests (tensor and pipeline parallelism). All ranks use the smallest
    limits of any rank, so that they start the same requests."""

    @property
    def _sync(self) -> SyncBetweenPasses:
        assert isinstance(self._rank_sync, SyncBetweenPasses), "this session needs ranks with the same rows"
        return self._rank_sync

    def _own_block(self, block: Block, remaining: Sequence[int]) -> tuple[Block, Sequence[int]]:
        return block, remaining

    def _own_requests(self, order: Sequence[int]) -> Sequence[int]:
        return order

    def _chunk_sizes(
        self, block: Block, requests: Sequence[Request], lanes: Sequence[Sequence[Running]]
    ) -> Sequence[int | None]:
        return self._sync.min_over_ranks(super()._chunk_sizes(block, requests, lanes))

    def _lane_slots(self) -> LaneSlots:
        num_pages = self._plan.placement.kv.num_pages
        [least] = self._sync.min_over_ranks([num_pages])
        return Session._lane_slots(self)._replace(reserved_pages=num_pages - (least or 0))

    def _exchange_results(self, counts: PassCounts | None) -> tuple[PassCounts, Finished]:
        return counts or PassCounts.total([]), self._pop_finished()
