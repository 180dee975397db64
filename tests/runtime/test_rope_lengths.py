"""LongRoPE: neither the company in a lane nor a sequence's crossing of the limit changes a token from what `generate`
gives for its prompt alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime import ModelConfig, OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import Admission, Attention, DType, KVConfig, KVTier, Lanes, PolicyKind, Tier
from runtime.engine.records import PassRecord, Phase
from runtime.model.loading import load_model
from runtime.plan.placement.memory import SequenceSize, pass_tokens
from runtime.sequences.sequence import Completion, Request, SequenceState
from tests.runtime.long_rope import LIMIT, LONG_SHAPES, NUM_NEW_TOKENS, long_rope_reference
from tests.support import PROMPT_LENGTHS, Reference
from tests.toy import toy_shape

RESTARTS = {"phi-3": LIMIT + 1, "phi-moe": LIMIT + 1, "llama": None}  # only the Phis drop their cache


@pytest.fixture(params=LONG_SHAPES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ref(family: str, shared_home: Path) -> Reference:
    return long_rope_reference(family, shared_home)


def config_for(
    ref: Reference,
    rows: int = 3,
    lanes: int = 2,
    *,
    chunk: int = 64,
    admission: Admission = Admission.wave,
    kind: Lanes = Lanes.auto,
    kv: KVTier = KVTier.auto,
    attention: Attention = Attention.device,
) -> RuntimeConfig:
    return RuntimeConfig(
        model=ModelConfig(name="test", path=str(ref.directory), dtype=DType.float32, lanes=kind),
        offload=OffloadConfig(tier=Tier.nvme, resident_layers=0, read_chunk_mib=1),
        kv=KVConfig(tier=kv),
        policy=PolicyConfig(
            kind=PolicyKind.fixed,
            micro_batch_size=rows,
            num_micro_batches=lanes,
            prefill_chunk_tokens=chunk,
            admission=admission,
            attention=attention,
        ),
        sampling=SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True),
    )


def tokens(runtime: Runtime, prompts: Sequence[list[int]]) -> list[list[int]]:
    results = runtime.generate(prompts)
    assert all(isinstance(result, Completion) for result in results), results
    return [list(result.token_ids) for result in results if isinstance(result, Completion)]


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize(
    ("rows", "chunk", "admission"),
    [
        *((rows, LIMIT, Admission.wave) for rows in (1, 3)),  # leaves one token of those that begin again
        *((rows, 64, Admission.wave) for rows in (1, 2)),
        *((rows, 5, Admission.continuous) for rows in (2, 3)),
    ],
)
def test_neither_company_nor_chunks_nor_a_crossing_change_tokens(
    rows: int, chunk: int, admission: Admission, ref: Reference, opened: Callable[[RuntimeConfig], Runtime]
) -> None:
    assert tokens(opened(config_for(ref, rows, chunk=chunk, admission=admission)), ref.prompts) == ref.expected


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize(("rows", "admission"), [(1, Admission.wave), (3, Admission.continuous)])
def test_padded_lanes_begin_again_as_a_whole(
    rows: int, admission: Admission, ref: Reference, opened: Callable[[RuntimeConfig], Runtime]
) -> None:
    config = config_for(ref, rows, lanes=3, chunk=16, kind=Lanes.padded, admission=admission)
    assert tokens(opened(config), ref.prompts) == ref.expected


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(
    "road", [{"kv": KVTier.nvme}, {"attention": Attention.cpu}, {"kv": KVTier.nvme, "kind": Lanes.padded}]
)
def test_keys_that_live_elsewhere_are_computed_again_too(
    road: dict[str, KVTier | Attention], ref: Reference, opened: Callable[[RuntimeConfig], Runtime]
) -> None:
    assert tokens(opened(config_for(ref, **road)), ref.prompts) == ref.expected


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("num_known", [1, 7])
def test_sequences_that_go_on_after_a_stop_keep_their_tokens(
    num_known: int, ref: Reference, opened: Callable[[RuntimeConfig], Runtime]
) -> None:
    """Prefilled with what they had generated, below the limit, at it and beyond."""
    runtime = opened(config_for(ref, admission=Admission.continuous))
    made = [runtime.request(str(i), prompt) for i, prompt in enumerate(ref.prompts)]
    requests = [each for each in made if isinstance(each, Request)]
    known = {
        i: SequenceState(token_ids=tuple(expected[:num_known]), logprobs=(), generator_state=None)
        for i, expected in enumerate(ref.expected)
    }
    with runtime.session(runtime.plan(requests)) as session:
        found = {i: list(c.token_ids) for i, c in session.stream(range(len(requests)), requests, known)}
    assert [found[i] for i in range(len(requests))] == ref.expected


@pytest.mark.dealt(most=1)
def test_sequences_that_begin_again_hold_nobody_up(
    ref: Reference, family: str, opened: Callable[[RuntimeConfig], Runtime]
) -> None:
    """Their prompts go beside what others decode: only one that crosses before anybody decodes takes a pass more."""
    runtime = opened(config_for(ref, 7, 1, chunk=256))
    requests = [r for i, p in enumerate(ref.prompts) if isinstance(r := runtime.request(str(i), p), Request)]
    records: list[PassRecord] = []
    plan = runtime.plan(requests)
    with runtime.session(plan) as session:
        session.run(plan.blocks[0], requests, records.append)
    drops = RESTARTS[family] is not None
    assert len(records) == NUM_NEW_TOKENS + drops
    assert [record.phase for record in records].count(Phase.mixed) == 3 * drops  # prompts of 5, 8 and 9 tokens
    assert sum(r.counts.prompt_tokens for r in records) == sum(PROMPT_LENGTHS) + 4 * drops * (LIMIT + 1)


@pytest.mark.parametrize("is_packed", [True, False])
def test_the_ledger_counts_what_is_prefilled_once_more(is_packed: bool) -> None:
    """From prompts of 5 tokens come passes of the limit's; not where none crosses, or a sequence ends there."""
    plain = toy_shape(is_packed=is_packed)
    long = replace(plain, restart_tokens=100)
    for num_prompt, max_new, crosses in ((5, 96, True), (5, 95, False), (100, 50, False)):
        lane = [SequenceSize(num_prompt_tokens=num_prompt, max_new_tokens=max_new)] * 2
        most = 2 * (100 if is_packed else 112) if crosses else 2 * num_prompt  # a rectangle is as wide as its KV
        assert pass_tokens(long, lane, 1024) == most
        assert pass_tokens(plain, lane, 1024) == 2 * num_prompt


def test_the_class_itself_says_whether_it_drops_its_cache(family: str, ref: Reference) -> None:
    config = ModelConfig(name="test", path=str(ref.directory), dtype=DType.float32)
    lengths = load_model(config, torch.device("cpu"), None).rope_lengths
    assert lengths is not None
    assert lengths.restart_tokens == RESTARTS[family]


def test_models_without_long_rope_are_left_alone(reference: Callable[[str], Reference]) -> None:
    config = ModelConfig(name="test", path=str(reference("phi-3").directory), dtype=DType.float32)
    assert load_model(config, torch.device("cpu"), None).rope_lengths is None
