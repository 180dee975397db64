"""A session that streams completions without a model: each token follows from the request and the draws before it."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jobs.datasets import Row
from jobs.record.manifest import RunManifest
from jobs.record.output_rows import generation_schema, infer_column_schema
from jobs.record.parts import PartStore
from jobs.record.plan_file import publish_plan
from jobs.record.run_checkpoint import remove_checkpoints
from jobs.record.run_dir import RunDirectory
from jobs.run.block_loop import OpenBlocks
from jobs.run.progress import Progress
from jobs.run.requests import RequestBatch, plan_rows
from runtime.batching.admission import AdmissionLimits, SlotState, Waiting, max_cached_tokens, plan_pass
from runtime.batching.balance import Block, plan_blocks
from runtime.config.settings import Admission
from runtime.engine.records import PassCounts, PassRecord, Phase, StageTimes
from runtime.errors import Interrupted
from runtime.sequences.sequence import Completion, FinishReason, Request, SequenceState, TokenLogprobs

MANIFEST = RunManifest(semantic={"model.name": "fake"}, operational={}, versions={})
LIMITS = AdmissionLimits(num_lanes=2, lane_size=2, lane_tokens=8, page_tokens=4)
NUM_PAGES = 14  # so few that sequences give way
MAX_NEW_TOKENS = 12
EOS = 0
TIMES = StageTimes(
    read_seconds=(0.0, 0.5),
    copy_seconds=(0.0, 0.0),
    compute_seconds=(0.125, 0.0625),
    attention_seconds=(0.0, 0.0),
    stall_seconds=(0.0, 0.0),
    prefetch_hits=1,
    prefetch_misses=0,
    experts_total=0,
    experts_hit=0,
    experts_read=0,
    bytes_read_disk=4096,
    bytes_copied_device=0,
    bytes_copied_host=0,
    bytes_written_disk=0,
)


def made(num_rows: int = 11) -> RequestBatch:
    requests = [
        Request(id=f"row {i}", prompt_ids=tuple(range(1, 3 + i % 5)), max_new_tokens=MAX_NEW_TOKENS, sample_index=i % 2)
        for i in range(num_rows)
    ]
    rows = [
        Row(index=i, id=request.id, prompt="", messages=None, columns={"own": i}, error=None)
        for i, request in enumerate(requests)
    ]
    return RequestBatch(requests=requests, request_rows=rows, rejected=[], rejected_rows=[])


def blocks_of(batch: RequestBatch) -> tuple[Block, ...]:
    lengths = [len(request.prompt_ids) for request in batch.requests]
    return plan_blocks(lengths, micro_batch_size=2, num_micro_batches=2, is_packed=True)


def store_at(path: Path, batch: RequestBatch) -> PartStore:
    run, planned = RunDirectory(path=path), plan_rows(batch, blocks_of(batch))
    for folder in (run.generations, run.throughput):
        folder.mkdir(parents=True, exist_ok=True)
    publish_plan(run.plan, planned)
    fixed = generation_schema(has_logprobs=True)
    columns = infer_column_schema([row.columns for row in batch.request_rows], fixed)
    return PartStore(directory=run, manifest=MANIFEST, plan=planned, columns=columns, fixed_schema=fixed)


def start_waves(
    path: Path, session: "FakeSession", *, batch: RequestBatch | None = None, checkpoint_seconds: float | None = 0.0
) -> PartStore:
    """A start of the run in waves at `path`, up to its end."""
    batch = batch or made()
    store = store_at(path, batch)
    done = store.committed_parts()
    remove_checkpoints(store.directory, done)
    left = [block for block in blocks_of(batch) if block.index not in done]
    generate_left(session, left, batch, store, Admission.wave, checkpoint_seconds)
    store.publish_success()
    return store


def run_at(
    path: Path, session: "FakeSession", *, batch: RequestBatch | None = None, checkpoint_seconds: float = 0.0
) -> PartStore:
    """A start of the run at `path`, up to its end."""
    batch = batch or made()
    store = store_at(path, batch)
    left = [block for block in blocks_of(batch) if block.index not in store.committed_parts()]
    generate_left(session, left, batch, store, Admission.continuous, checkpoint_seconds)
    store.publish_success()
    return store


def generate_left(
    session: "FakeSession",
    left: Sequence[Block],
    batch: RequestBatch,
    store: PartStore,
    admission: Admission,
    checkpoint_seconds: float | None,
) -> None:
    with Progress(batch.requests, blocks_of(batch), is_wave=admission is Admission.wave) as progress:
        for group in [[block] for block in left] if admission is Admission.wave else [left]:
            OpenBlocks(
                session=session,
                blocks=group,
                batch=batch,
                store=store,
                is_wave=admission is Admission.wave,
                checkpoint_seconds=checkpoint_seconds,
                progress=progress,
            ).generate()


@dataclass(kw_only=True)
class Growing:
    """A sequence; `state` stands for its generator's: another one for each draw."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    state: bytes | None = None

    def draw(self) -> None:
        before = self.state if self.state is not None else repr(self.request.key).encode()
        self.state = hashlib.sha256(before).digest()
        token = self.state[0] % 8
        self.token_ids.append(token)
        half = self.state[1] / 2
        self.logprobs.append(TokenLogprobs(own=-half, top_ids=(token, 9), top=(-half, -200.0)))

    @property
    def finish(self) -> FinishReason | None:
        if self.token_ids[-1:] == [EOS]:
            return FinishReason.eos
        return FinishReason.length if len(self.token_ids) >= self.request.max_new_tokens else None

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(
            request=self.request,
            token_ids=tuple(self.token_ids),
            text=f"{self.token_ids} \ud800",
            finish=self.finish,
            error=None,
            logprobs=tuple(self.logprobs),
        )


class FakeSession:
    """Its passes are decided as the engine's are. `stop_after` passes it raises `stop`; `num_sampled` counts tokens.

    `reports_first`: whether `on_pass` is called before the completions of the pass are given.
    """

    def __init__(
        self,
        *,
        stop_after: int | None = None,
        reports_first: bool = False,
        stop: Exception = Interrupted("stopped"),  # noqa: B008 - it is the same to all
    ):
        self._stop_after, self._reports_first, self._stop = stop_after, reports_first, stop
        self._running: dict[int, Growing] = {}
        self.num_sampled = 0
        self.num_passes = 0
        self.order: list[int] = []

    def snapshot(self) -> dict[int, SequenceState]:
        return {
            i: SequenceState(token_ids=tuple(s.token_ids), logprobs=tuple(s.logprobs), generator_state=s.state)
            for i, s in self._running.items()
        }

    def wave(
        self,
        block: Block,
        left: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, SequenceState],
        on_pass: Callable[[PassRecord], None],
    ) -> Iterator[tuple[int, Completion]]:
        assert set(left) <= set(block.members)
        return self.stream(left, requests, unfinished, on_pass)

    def stream(
        self,
        order: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, SequenceState],
        on_pass: Callable[[PassRecord], None],
    ) -> Iterator[tuple[int, Completion]]:
        self.order = list(order)
        assert set(unfinished) <= set(order)
        sequences = {i: self._start(requests[i], unfinished.get(i)) for i in order}
        waiting = [_waiting(i, sequences[i]) for i in order]
        slots: list[SlotState] = []
        while waiting or slots:
            if self.num_passes == self._stop_after:
                raise self._stop
            free = NUM_PAGES - sum(LIMITS.pages(slot.num_cached) for slot in slots)
            plan = plan_pass(waiting, slots, free, LIMITS)
            kept = len(slots) - len(plan.preempted)
            waiting = [*(_waiting(s.request, sequences[s.request]) for s in slots[kept:]), *waiting]
            slots = slots[:kept]
            for i, lane in plan.admitted:
                slots.append(SlotState(lane=lane, num_cached=0, **vars(waiting.pop(0))))
                self._running[i] = sequences[i]
            slots, done, record = self._pass(slots, plan.new_tokens)
            if self._reports_first:
                on_pass(record)
            for i in done:
                del self._running[i]
                yield i, sequences[i].completion()
            if not self._reports_first:
                on_pass(record)

    def _start(self, request: Request, unfinished: SequenceState | None) -> Growing:
        if unfinished is None:
            return Growing(request=request)
        assert unfinished.token_ids or unfinished.generator_state is None
        tokens, logprobs = list(unfinished.token_ids), list(unfinished.logprobs)
        return Growing(request=request, token_ids=tokens, logprobs=logprobs, state=unfinished.generator_state)

    def _pass(
        self, slots: Sequence[SlotState], new_tokens: Mapping[int, int]
    ) -> tuple[list[SlotState], list[int], PassRecord]:
        after, done, num_sampled, num_prompt = list[SlotState](), list[int](), 0, 0
        for old in slots:
            new, sequence = new_tokens.get(old.request, 0), self._running[old.request]
            num_prompt += new if old.num_missing > 1 else 0
            if new and new == old.num_missing:
                sequence.draw()
                num_sampled += 1
            if sequence.finish is not None:
                done.append(old.request)
            else:
                known = len(sequence.request.prompt_ids) + len(sequence.token_ids)
                after.append(replace(old, num_cached=old.num_cached + new, num_known=known))
        self.num_sampled += num_sampled
        record = _record(self.num_passes, sum(new_tokens.values()), num_prompt, num_sampled)
        self.num_passes += 1
        return after, done, record


def _waiting(request: int, sequence: Growing) -> Waiting:
    num_prompt = len(sequence.request.prompt_ids)
    most = max_cached_tokens(num_prompt, sequence.request.max_new_tokens)
    return Waiting(request=request, num_known=num_prompt + len(sequence.token_ids), max_cached=most)


def _record(index: int, num_tokens: int, num_prompt: int, num_sampled: int) -> PassRecord:
    phase = Phase.decode if not num_prompt else Phase.prefill if num_prompt == num_tokens else Phase.mixed
    return PassRecord(
        block=0,
        index=index,
        phase=phase,
        counts=PassCounts(
            num_sequences=num_sampled,
            real_tokens=num_tokens,
            padded_tokens=num_tokens,
            prompt_tokens=num_prompt,
            issued_tokens=num_sampled,
            useful_tokens=num_sampled,
        ),
        seconds=0.25,
        times=TIMES,
        host_bytes=0,
        device_bytes=0,
        peak_host_bytes=0,
        peak_device_bytes=0,
    )
