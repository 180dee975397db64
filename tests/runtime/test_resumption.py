"""A block that was stopped inside goes on from the tokens that it has, in lanes of every kind: greedy tokens are those
of transformers, none is sampled twice, and no pass takes more memory than was planned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from runtime import OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.batching.balance import Block
from runtime.config.settings import DType, KVConfig, KVTier, ModelConfig, PolicyKind, Tier
from runtime.engine.records import PassRecord, Phase
from runtime.plan.planner import RunPlan
from runtime.sequences.sequence import Request, SequenceState, resume_lane, resume_sequence
from tests.support import NUM_NEW_TOKENS, NUM_SAMPLED, TEMPERATURE, TOP_P, Reference

References = Callable[[str], Reference]
KINDS = ("llama", "qwen3-next", "t5")
CHUNK_TOKENS = 24
SAMPLED = SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True, temperature=TEMPERATURE, top_p=TOP_P)
GREEDY = SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)


class Stopped(Exception):
    """Ends a start behind one of its passes."""


@dataclass(kw_only=True)
class Stops:
    """Starts of one block, each with what the ones before have left."""

    runtime: Runtime
    plan: RunPlan
    requests: Sequence[Request]
    tokens: dict[int, list[int]] = field(default_factory=dict)  # of finished rows
    unfinished: dict[int, SequenceState] = field(default_factory=dict)
    passes: list[PassRecord] = field(default_factory=list)

    @property
    def block(self) -> Block:
        return self.plan.blocks[0]

    def start(self, num_passes: int | None = None) -> None:
        """Up to the end, or up to the stop behind so many passes."""
        done: list[PassRecord] = []

        def on_pass(record: PassRecord) -> None:
            done.append(record)
            if len(done) == num_passes:
                raise Stopped

        left = [i for i in self.block.members if i not in self.tokens]
        with self.runtime.session(self.plan) as session:
            try:
                for i, completion in session.wave(self.block, left, self.requests, self.unfinished, on_pass):
                    self.tokens[i] = list(completion.token_ids)
            except Stopped:
                self.unfinished |= session.snapshot()
        self.passes += done

    def in_order(self) -> list[list[int]]:
        return [self.tokens[i] for i in range(len(self.requests))]


def made(
    reference: Reference, sampling: SamplingConfig = GREEDY, *, kv: KVTier = KVTier.auto, limits: Sequence[int] = ()
) -> Stops:
    """`limits`: of new tokens, of the requests in turn."""
    runtime = Runtime(
        RuntimeConfig(
            model=ModelConfig(name="test", path=str(reference.directory), dtype=DType.float32),
            offload=OffloadConfig(tier=Tier.nvme, resident_layers=0, read_chunk_mib=1),
            kv=KVConfig(tier=kv, device_fraction=None if kv is KVTier.auto else 0.0),
            policy=PolicyConfig(
                kind=PolicyKind.fixed, micro_batch_size=4, num_micro_batches=2, prefill_chunk_tokens=CHUNK_TOKENS
            ),
            sampling=sampling,
        )
    )
    requests = list[Request]()
    for n, prompt in enumerate(reference.prompts):
        request = runtime.request(str(n), prompt)
        assert isinstance(request, Request)
        requests.append(replace(request, max_new_tokens=limits[n % len(limits)]) if limits else request)
    return Stops(runtime=runtime, plan=runtime.plan(requests), requests=requests)


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("family", KINDS)
def test_stopped_again_and_again_a_block_comes_to_the_tokens_of_transformers(
    family: str, reference: References
) -> None:
    limits = (7, 4, 6)  # rows finish on the way
    stops = made(reference(family), limits=limits)
    for num_passes in (3, 2, None):
        stops.start(num_passes)
    expected = [tokens[: limits[n % 3]] for n, tokens in enumerate(reference(family).expected)]
    assert stops.in_order() == expected
    assert sum(record.counts.useful_tokens for record in stops.passes) == sum(map(len, expected))


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", ["llama", "bloom", "t5"])
def test_keys_and_values_on_disk_are_made_again(family: str, reference: References) -> None:
    stops = made(reference(family), kv=KVTier.nvme)
    stops.start(4)
    assert stops.unfinished
    stops.start()
    assert stops.in_order() == reference(family).expected


def test_sampled_rows_draw_on_from_where_their_generators_were(reference: References) -> None:
    stops = made(reference("llama"), SAMPLED)
    for num_passes in (3, 3, None):
        stops.start(num_passes)
    assert stops.in_order()[:NUM_SAMPLED] == reference("llama").sampled


def test_a_decoder_behind_an_encoder_is_given_its_tokens_in_as_few_passes_as_find_room(reference: References) -> None:
    stops = made(reference("t5"))
    stops.start(5)
    stops.start()
    resumed_passes = stops.passes[5:]
    assert [record.phase for record in resumed_passes] == [Phase.prefill, Phase.decode]
    assert resumed_passes[0].counts.prompt_tokens == sum(len(r.prompt_ids) + 5 for r in stops.requests)


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_where_the_budget_has_no_room_to_spare_a_pass_carries_no_more_than_was_planned(
    family: str, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = made(reference(family))
    stops.start(5)
    planned = max(record.counts.padded_tokens for record in stops.passes)
    monkeypatch.setattr("runtime.plan.placement.ledger.Ledger.left_bytes", 0)
    stops.start()
    assert stops.in_order() == reference(family).expected
    assert max(record.counts.padded_tokens for record in stops.passes) <= planned


def test_without_room_a_decoder_behind_an_encoder_is_given_its_tokens_one_by_one(
    reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.plan.placement.memory.encoder_activation_bytes", lambda shape, lane: 0)
    monkeypatch.setattr("runtime.plan.placement.ledger.Ledger.left_bytes", 0)
    stops = made(reference("t5"))
    stops.start(4)
    stops.start()
    assert [record.phase for record in stops.passes[4:]] == [Phase.prefill, *[Phase.mixed] * 3, *[Phase.decode] * 3]
    assert [record.counts.useful_tokens for record in stops.passes[4:]] == [0] * 4 + [len(stops.requests)] * 3
    assert stops.in_order() == reference("t5").expected


def test_in_a_rectangle_rows_that_have_generated_unequally_much_begin_again(caplog: pytest.LogCaptureFixture) -> None:
    requests = [Request(id=str(i), prompt_ids=(1, 2), max_new_tokens=4) for i in range(3)]
    states = [SequenceState(token_ids=(5,) * n, logprobs=(), generator_state=None) for n in (1, 2, 2)]
    cpu = torch.device("cpu")
    packed = resume_lane(requests, states, cpu, is_packed=True)
    assert [len(sequence.generated) for sequence in packed] == [1, 2, 2]
    padded = resume_lane(requests, states, cpu, is_packed=False)
    assert [len(sequence.generated) for sequence in padded] == [0, 0, 0]
    assert "rows restart" in caplog.text
    assert [len(s.generated) for s in resume_lane(requests[1:], states[1:], cpu, is_packed=False)] == [2, 2]


def test_a_generator_of_another_kind_of_device_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    request = Request(id="a", prompt_ids=(1,), max_new_tokens=4)
    state = SequenceState(token_ids=(7,), logprobs=(), generator_state=bytes(16))
    assert resume_sequence(request, state, torch.device("cpu")).generated == []
    assert "restarts" in caplog.text
