"""Generates blocks of requests on a model with loaded weights, and yields completions."""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from ..batching.admission import AdmissionLimits
from ..batching.balance import Block
from ..batching.prefixes import WITHIN_LANES
from ..config.settings import Admission, PolicyConfig
from ..model.loading import LoadedModel
from ..plan.placement.defaults import chunk_tokens
from ..plan.placement.experts import Routing
from ..plan.placement.memory import PAGE_TOKENS, resumed_chunks
from ..plan.planner import RunPlan
from ..requests.joining import drop_orphaned_beams
from ..sequences.detokenizer import Detokenizer
from ..sequences.reasoning import Reasoning, SplitText
from ..sequences.sequence import Completion, Request, SequenceState, resume_lane, resume_sequence, start_sequence
from ..sequences.sequence import Sequence as Running
from .batcher import Batcher, ContinuousBatcher, StaticBatcher, insert_prefixes
from .engine import Engine
from .records import PassRecord

OnPass = Callable[[PassRecord], None]


class Arrivals(NamedTuple):
    """Changes between two passes of `Session.live`: new requests by a number that is never used again, and numbers of
    requests that nobody waits for any more."""

    new: Mapping[int, Request]
    cancelled: Collection[int] = ()


Arrive = Callable[[bool], Arrivals | None]


class LaneSlots(NamedTuple):
    """Capacity of continuous batching: `num_lanes` lanes of `lane_size` sequences. A lane prefills up to `chunk_tokens`
    tokens per pass. `reserved_pages`: KV pages of other ranks."""

    num_lanes: int
    lane_size: int
    chunk_tokens: int
    reserved_pages: int = 0

    def share(self, num_shares: int, num_pages: int) -> "LaneSlots":
        """The capacity of one of `num_shares` ranks that share `num_pages` KV pages: smaller lanes, and fewer of them
        if a lane would have less than one sequence."""
        num_lanes = max(1, min(self.num_lanes, self.num_lanes * self.lane_size // num_shares))
        return LaneSlots(
            num_lanes=num_lanes,
            lane_size=max(1, self.lane_size // num_shares),
            chunk_tokens=max(1, self.chunk_tokens // num_shares),
            reserved_pages=num_pages - num_pages // num_shares,
        )


def ignore_pass(record: PassRecord) -> None:
    """Default `on_pass` callback: does nothing."""


class Session:
    """Runs the plan's blocks. Valid inside `Runtime.session`. After an exception only `snapshot` may be called. Not
    thread-safe.

    Requests are identified by their positions in `requests`, the list that the plan was made for. `on_pass` is called
    after each pass, once its completions have been consumed. `opening_seconds`: time to open the session."""

    def __init__(
        self,
        model: LoadedModel,
        engine: Engine,
        plan: RunPlan,
        policy: PolicyConfig,
        *,
        opening_seconds: float = 0.0,
        reasoning: Reasoning | None = None,
    ):
        self.opening_seconds, self._reasoning = opening_seconds, reasoning
        self._model, self._engine, self._plan, self._policy = model, engine, plan, policy
        self._active: dict[int, Running] = {}
        tokenizer = model.tokenizer
        self._detokenizer = Detokenizer(tokenizer, model.start_token_id) if tokenizer is not None else None

    @property
    def routing(self) -> Routing | None:
        """How often decode passes hit each paged expert so far, for later plans; None if that is not known."""
        return self._engine.routing

    def probe(self, requests: Sequence[Request]) -> None:
        """Runs the first pass of the heaviest block as a memory test, and discards the result."""
        if self._policy.admission is Admission.continuous:
            running = {i: start_sequence(requests[i]) for block in self._plan.blocks for i in block.members}
            batcher = self._continuous_batcher({i: s for i, s in running.items() if s.finish is None})
        else:
            heaviest = max(self._plan.blocks, key=lambda b: sum(len(requests[i].prompt_ids) for i in b.members))
            running = {i: Running(request=requests[i]) for i in heaviest.members if requests[i].max_new_tokens}
            lanes = [[running[i] for i in group if i in running] for group in heaviest.micro_batches]
            lanes = self._with_shared_prefixes(heaviest, running, lanes)
            batcher = StaticBatcher.from_block(self._engine.lanes, heaviest.index, lanes)
        with batcher:
            self._engine.step(batcher)

    def generate(self, requests: Sequence[Request], on_pass: OnPass = ignore_pass) -> Generator[tuple[int, Completion]]:
        """Generates all blocks of the plan with the policy's admission, and yields completions as they finish."""
        if self._policy.admission is Admission.continuous:
            order = [i for block in self._plan.blocks for i in block.members]
            yield from self.stream(order, requests, {}, on_pass)
        else:
            for block in self._plan.blocks:
                yield from self.wave(block, block.members, requests, {}, on_pass)

    def run(self, block: Block, requests: Sequence[Request], on_pass: OnPass = ignore_pass) -> list[Completion]:
        """Generates one block. Returns its completions in the order of `block.members`."""
        completions = dict(self.wave(block, block.members, requests, {}, on_pass))
        return [completions[i] for i in block.members if requests[i].is_returned]

    def wave(
        self,
        block: Block,
        remaining: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, SequenceState],
        on_pass: OnPass = ignore_pass,
    ) -> Generator[tuple[int, Completion]]:
        """Generates the members of one block that are in `remaining`, and yields completions as they finish.
        `unfinished`: saved states to resume from. Without them, the output for the same `remaining` is bitwise
        reproducible."""
        remaining = drop_orphaned_beams(remaining, requests)
        lanes = list[dict[int, Running]]()
        device, is_packed = self._engine.torch_device, self._model.shape.is_packed
        for group in block.micro_batches:
            members = [i for i in group if i in remaining]
            states = [unfinished.get(i) for i in members]
            running = resume_lane([requests[i] for i in members], states, device, is_packed=is_packed)
            lanes.append(dict(zip(members, running, strict=True)))
        self._active = {i: sequence for lane in lanes for i, sequence in lane.items()}
        entering = [[sequence for sequence in lane.values() if sequence.finish is None] for lane in lanes]
        chunks = self._chunk_sizes(block, requests, entering)
        entering = self._with_shared_prefixes(
            block, {i: s for i, s in self._active.items() if s.finish is None}, entering
        )
        return self._generate(StaticBatcher.from_block(self._engine.lanes, block.index, entering, chunks), on_pass)

    def stream(
        self,
        order: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, SequenceState],
        on_pass: OnPass = ignore_pass,
    ) -> Generator[tuple[int, Completion]]:
        """Continuous batching: requests enter in `order` as others finish. Yields completions as they finish.
        `unfinished`: saved states to resume from."""
        # Padded lanes restart from the prompt: prefilling generated tokens would make the rectangle wider than planned,
        # and a decoder cannot prefill answers of unequal lengths.
        states, device = unfinished if self._model.shape.is_packed else {}, self._engine.torch_device
        self._active = {i: resume_sequence(requests[i], states.get(i), device) for i in order}
        entering = {i: sequence for i, sequence in self._active.items() if sequence.finish is None}
        return self._generate(self._continuous_batcher(entering), on_pass)

    def live(self, arrive: Arrive, on_pass: OnPass = ignore_pass) -> Generator[tuple[int, Completion]]:
        """Continuous batching of requests that arrive while others run; yields completions as they finish.

        `arrive(is_idle)` is called before each pass, and ends the session with None. If `is_idle`, no request is left:
        it should wait for one. The session's plan limits the requests: none may be longer than those that it was made
        for. In padded lanes, requests wait until all earlier ones have finished."""
        self._active = {}
        waiting = dict[int, Running]()
        with ExitStack() as stack:
            batcher: Batcher | None = None
            while (arrivals := arrive(not self._active)) is not None:
                new = {i: start_sequence(request) for i, request in arrivals.new.items()}
                self._active |= new
                waiting |= {i: sequence for i, sequence in new.items() if sequence.finish is None}
                for i in [i for i in arrivals.cancelled if i in self._active]:
                    del self._active[i]
                    if waiting.pop(i, None) is None and isinstance(batcher, ContinuousBatcher):
                        batcher.remove(i)
                yield from self._pop_finished()
                if isinstance(batcher, ContinuousBatcher):
                    batcher.add(waiting)
                    waiting = {}
                elif batcher is None and waiting:
                    batcher, waiting = stack.enter_context(self._continuous_batcher(waiting)), {}
                record = self._engine.step(batcher) if batcher is not None else None
                if record is not None:
                    yield from self._pop_finished()
                    on_pass(record)
                elif isinstance(batcher, StaticBatcher):
                    batcher = None

    def text_so_far(self, i: int) -> str | None:
        """The text that an unfinished request has generated; its end may still change. None without a tokenizer, and
        if reasoning is split off, which needs the whole text."""
        if self._detokenizer is None or self._reasoning is not None:
            return None
        sequence = self._active[i]
        return self._detokenizer.completion_text(sequence.request, sequence.generated)

    def _generate(self, batcher: Batcher, on_pass: OnPass) -> Generator[tuple[int, Completion]]:
        yield from self._pop_finished()
        with batcher:
            while (record := self._engine.step(batcher)) is not None:
                yield from self._pop_finished()
                on_pass(record)

    def snapshot(self) -> dict[int, SequenceState]:
        """The state of every unfinished sequence with generated tokens, also after an interruption."""
        return {i: s.snapshot() for i, s in self._active.items() if s.generated and s.finish is None}

    def _with_shared_prefixes(
        self, block: Block, running: Mapping[int, Running], lanes: list[list[Running]]
    ) -> list[list[Running]]:
        """`lanes` plus the sequences that compute shared prefixes."""
        rule = self._engine.lanes.sharing
        if not self._plan.prefixes or rule is None:
            return lanes
        return insert_prefixes(block.micro_batches, self._plan.prefixes, running, rule)

    def _chunk_sizes(
        self, block: Block, requests: Sequence[Request], lanes: Sequence[Sequence[Running]]
    ) -> Sequence[int | None]:
        """Prefill tokens per pass of each lane; None: the policy's. Resumed sequences may need smaller chunks."""
        if not any(sequence.generated for lane in lanes for sequence in lane):
            return [None] * len(lanes)
        compute = self._plan.placement.compute_ledger
        return resumed_chunks(
            self._model.shape,
            planned=[[requests[i].size for i in group] for group in block.micro_batches],
            resumed=[[sequence.known_size for sequence in lane] for lane in lanes],
            chunk_tokens=chunk_tokens(self._policy),
            spare_bytes=max(0, compute.left_bytes),
        )

    def _lane_slots(self) -> LaneSlots:
        return LaneSlots(self._plan.num_lanes, self._plan.lane_size, chunk_tokens(self._policy))

    def _continuous_batcher(self, sequences: Mapping[int, Running]) -> Batcher:
        num_lanes, lane_size, num_tokens, reserved_pages = self._lane_slots()
        if not self._model.shape.is_packed:
            waiting = list(sequences.values())
            return StaticBatcher.from_sequences(self._engine.lanes, waiting, num_lanes=num_lanes, lane_size=lane_size)
        rule = self._engine.lanes.sharing
        limits = AdmissionLimits.from_lanes(
            rule or WITHIN_LANES,
            num_lanes=num_lanes,
            lane_size=lane_size,
            chunk_tokens=num_tokens,
            page_tokens=PAGE_TOKENS,
            reserved_pages=reserved_pages,
        )
        prefixes = self._plan.prefixes if rule is not None else ()
        return ContinuousBatcher(self._engine.lanes, sequences, limits, prefixes)

    def _pop_finished(self) -> list[tuple[int, Completion]]:
        finished = [(i, self._active.pop(i)) for i in [i for i, s in self._active.items() if s.finish is not None]]
        return [(i, self._completion(sequence)) for i, sequence in finished if sequence.request.is_returned]

    def _completion(self, sequence: Running) -> Completion:
        assert sequence.finish is not None, "the block ended with unfinished sequences"
        if self._reasoning is not None:
            parts = self._reasoning.split(sequence)
        else:
            texts = self._detokenizer
            text = texts.completion_text(sequence.request, sequence.generated) if texts is not None else ""
            parts = SplitText(reasoning=None, text=text[: sequence.text_end])
        return Completion(
            request=sequence.request,
            token_ids=tuple(sequence.generated),
            text=parts.text,
            reasoning=parts.reasoning,
            finish=sequence.finish,
            error=sequence.error,
            logprobs=tuple(sequence.logprobs),
            beam_score=sequence.beam_score,
            scores=tuple(sequence.scores),
            vector=sequence.vector,
        )
