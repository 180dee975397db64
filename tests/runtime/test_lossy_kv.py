"""Runs whose keys and values are kept in fewer bytes: tokens are those of transformers with a cache that keeps them by
the same rule, whatever the tier, the chunks and the neighbours, and more sequences fit.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.planning.shapes import read_shape
from runtime import OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import (
    Admission,
    Attention,
    DType,
    KVConfig,
    KVDType,
    KVTier,
    Lanes,
    ModelConfig,
    Order,
    PolicyKind,
    Tier,
)
from runtime.errors import ConfigError
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.load import Load
from runtime.plan.placement.memory import SequenceSize
from runtime.plan.placement.placement import Budgets
from runtime.plan.placement.placer import choose_placement
from runtime.plan.planner import RunPlan, find_policy
from runtime.plan.search.candidate import Problem
from runtime.plan.shape.dtypes import with_kv_dtype
from runtime.sequences.sequence import Completion, Request
from runtime.stream.device import ComputeDevice
from runtime.units import GIB
from tests.fake_device import FakeDevice
from tests.quantized_cache import kept_greedy
from tests.runtime.sharing_support import run_alike, unshared
from tests.runtime.test_resumption import Stops
from tests.support import CLEAR_MARGIN, Reference, made_once, transformers_model

References = Callable[[str], Reference]
Answer = tuple[Reference, list[list[int]], list[list[int]]]
Answers = Callable[[str, KVDType], Answer]
LOSSY = [KVDType.bfloat16, KVDType.float8, KVDType.int8, KVDType.int4]
NUM_NEW, LENGTHS = 14, (45, 3, 16, 31, 17)


def config_for(ref: Reference, dtype: KVDType, tier: KVTier = KVTier.device, **policy: object) -> RuntimeConfig:
    sizes = {"micro_batch_size": 2, "num_micro_batches": 3} | policy
    return RuntimeConfig(
        model=ModelConfig(name="test", path=str(ref.directory), dtype=DType.float32),
        offload=OffloadConfig(tier=Tier.none),
        kv=KVConfig(tier=tier, dtype=dtype, device_fraction=None if tier is KVTier.device else 0.0),
        policy=PolicyConfig(kind=PolicyKind.fixed, **sizes),
        sampling=SamplingConfig(max_new_tokens=NUM_NEW, ignore_eos=True),
    )


def tokens(config: RuntimeConfig, prompts: list[list[int]], device: ComputeDevice | None = None) -> list[list[int]]:
    results = Runtime(config, device=device).generate(prompts)
    return [list(result.token_ids) for result in results if isinstance(result, Completion)]


@pytest.fixture(scope="module")
def answers(reference: References, shared_home: Path) -> Answers:
    """The reference of a family, prompts of several pages, and what transformers says with a cache of that dtype: of
    prompts whose tokens are each a clear choice. Made once for all workers."""

    def get(family: str, dtype: KVDType) -> Answer:
        ref = reference(family)

        def make(home: Path) -> None:
            (home / "answers.json").write_text(json.dumps(clear_answers(ref, dtype)))

        home = made_once(shared_home / "kept" / f"{family}-{dtype.value}", make)
        return ref, *json.loads((home / "answers.json").read_text())

    return get


def clear_answers(ref: Reference, dtype: KVDType) -> tuple[list[list[int]], list[list[int]]]:
    model, prompts, expected = transformers_model(ref.directory), list[list[int]](), list[list[int]]()
    source = [token for prompt in ref.prompts for token in prompt]
    for shift, length in enumerate(LENGTHS):
        prompt = (source * 2)[7 * shift : 7 * shift + length]
        found, margin = kept_greedy(model, prompt, NUM_NEW, dtype)
        if margin > CLEAR_MARGIN:
            prompts.append(prompt)
            expected.append(found)
    assert len(prompts) >= 3, "few of the answers are clear"
    return prompts, expected


FAMILIES = [
    *[(family, dtype) for family in ("llama", "mixtral", "mistral") for dtype in (KVDType.int8, KVDType.int4)],
    *[("llama", KVDType.bfloat16), ("llama", KVDType.float8), ("gpt-oss", KVDType.int4)],
]


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_tokens_are_those_of_transformers_with_a_cache_kept_so(family: str, dtype: KVDType, answers: Answers) -> None:
    """A mixture, a window of nine and sinks among them; by prompts whole and in pieces of seven."""
    ref, prompts, expected = answers(family, dtype)
    assert tokens(config_for(ref, dtype), prompts) == expected
    assert tokens(config_for(ref, dtype, prefill_chunk_tokens=7), prompts) == expected


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("dtype", [KVDType.float8, KVDType.int8, KVDType.int4])
def test_tiers_give_the_same_tokens(dtype: KVDType, answers: Answers) -> None:
    """On a CPU, and in front of an accelerator whose copies come as late as they may, whole and in pieces."""
    ref, prompts, expected = answers("llama", dtype)
    assert tokens(config_for(ref, dtype, KVTier.nvme), prompts) == expected
    for tier in KVTier.device, KVTier.cpu, KVTier.nvme:
        config = config_for(ref, dtype, tier, prefill_chunk_tokens=7)
        assert tokens(config, prompts, FakeDevice((False, True))) == expected, tier


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(
    "settings", [{"schedule": Order.flexgen}, {"attention": Attention.cpu}, {"num_micro_batches": 1}]
)
def test_orders_workers_and_neighbours_change_no_token(settings: dict[str, object], answers: Answers) -> None:
    ref, prompts, expected = answers("llama", KVDType.int8)
    assert tokens(config_for(ref, KVDType.int8, **settings), prompts) == expected
    assert tokens(config_for(ref, KVDType.int8, **settings), prompts[1:]) == expected[1:]


@pytest.mark.parametrize("dtype", [KVDType.int8, KVDType.int4])
def test_rows_that_enter_as_others_leave_get_the_same_tokens(dtype: KVDType, answers: Answers) -> None:
    ref, prompts, expected = answers("llama", dtype)
    config = config_for(ref, dtype, micro_batch_size=1, num_micro_batches=2, admission=Admission.continuous)
    assert tokens(config, prompts) == expected


@pytest.mark.parametrize("tier", [KVTier.device, KVTier.nvme])
def test_what_prompts_share_is_computed_once_and_changes_no_token(tier: KVTier, reference: References) -> None:
    """Prefixes that end within a page are shared up to its begin."""
    ref = reference("llama")
    prefix = [*ref.prompts[3], *ref.prompts[1]]
    prompts = [prefix + prompt for prompt in ref.prompts[:4]]
    config = config_for(ref, KVDType.int8, tier, micro_batch_size=4, num_micro_batches=1)
    ran = run_alike(Runtime(config), prompts)
    assert ran.tokens == run_alike(Runtime(unshared(config)), prompts).tokens
    assert ran.num_spared > 0
    assert ran.num_pages_left == 0


@pytest.mark.parametrize("dtype", [KVDType.int8, KVDType.int4])
def test_a_block_that_was_stopped_goes_on_to_the_same_tokens(dtype: KVDType, answers: Answers) -> None:
    """What was decoded before is prefilled then."""
    ref, prompts, expected = answers("llama", dtype)
    runtime = Runtime(config_for(ref, dtype))
    requests = [
        made for n, prompt in enumerate(prompts) if isinstance(made := runtime.request(str(n), prompt), Request)
    ]
    stops = Stops(runtime=runtime, plan=runtime.plan(requests), requests=requests)
    for num_passes in (5, 11, None):
        stops.start(num_passes)
    assert stops.in_order() == expected


def test_more_sequences_fit_in_fewer_bytes() -> None:
    """Of 2048 positions each, tails take two hundredths at most; the other terms of a block take less."""
    shape = read_shape("llama-3.1-8b", DType.bfloat16)
    config = RuntimeConfig(offload=OffloadConfig(resident_layers=0), kv=KVConfig(tier="device"))
    budgets = Budgets(host_bytes=64 * GIB, device_bytes=64 * GIB)
    lane = [SequenceSize(num_prompt_tokens=1792, max_new_tokens=256)] * 8

    def most_lanes(dtype: KVDType) -> int:
        kept = with_kv_dtype(shape, dtype)
        fits = (
            choose_placement(kept, config, budgets, Load.from_lanes(kept, [lane] * num, 512)).fits
            for num in range(8, 512, 2)
        )
        return next(8 + 2 * turn for turn, does_fit in enumerate(fits) if not does_fit)

    exact = most_lanes(KVDType.auto)
    assert most_lanes(KVDType.float8) == pytest.approx(2 * exact, rel=0.06)
    assert most_lanes(KVDType.int8) == pytest.approx(exact / 0.543, rel=0.06)
    assert most_lanes(KVDType.int4) == pytest.approx(exact / 0.311, rel=0.06)


@pytest.mark.slow("runtime/test_lossy_kv.py::test_tokens_are_those_of_transformers_with_a_cache_kept_so")
def test_a_search_leaves_keys_and_values_as_they_are_asked_for() -> None:
    """However little memory there is; asked for in fewer bytes, its blocks are larger, and no plan goes back."""
    shape = read_shape("llama-3.1-8b", DType.bfloat16)
    sizes = [SequenceSize(num_prompt_tokens=1024, max_new_tokens=256)] * 512
    budgets, rates = (
        Budgets(host_bytes=64 * GIB, device_bytes=16 * GIB),
        MachineRates(
            disk_bytes_per_second=2e9, link_in_bytes_per_second=1.6e10, gemm_flops_per_second={1: 1e11, 512: 3e13}
        ),
    )

    def found(dtype: KVDType) -> RunPlan:
        config = RuntimeConfig(kv=KVConfig(dtype=dtype, tier="device"), policy=PolicyConfig(kind=PolicyKind.hrm))
        problem = Problem(shape=with_kv_dtype(shape, dtype), config=config, budgets=budgets, sizes=sizes, rates=rates)
        plan = find_policy(problem)
        assert plan.kv.dtype is dtype
        return plan

    exact, lossy = found(KVDType.auto), found(KVDType.int8)
    assert len(lossy.blocks[0].members) > 1.5 * len(exact.blocks[0].members)


@pytest.mark.parametrize("dtype", LOSSY)
def test_padded_lanes_are_refused_by_the_key_and_a_model_without_a_name_by_its_class(
    dtype: KVDType, reference: References
) -> None:
    config = config_for(reference("llama"), dtype)
    for name, called in (("test", "test"), ("hf", "LlamaForCausalLM")):
        with pytest.raises(ConfigError, match=f"kv.dtype={dtype.value}: {called} runs in padded lanes"):
            Runtime(replace(config, model=replace(config.model, name=name, lanes=Lanes.padded)))


def test_latents_are_refused_quantised_and_kept_in_bfloat16(reference: References) -> None:
    config = config_for(reference("deepseek-v3"), KVDType.int8)
    with pytest.raises(ConfigError, match=r"kv\.dtype=int8: test caches latents"):
        Runtime(config)
    ref = reference("deepseek-v3")
    assert all(tokens(config_for(ref, KVDType.bfloat16), ref.prompts))


def test_attention_of_the_cpu_beside_an_accelerator_is_refused(reference: References) -> None:
    config = config_for(reference("llama"), KVDType.int8, KVTier.cpu, attention=Attention.cpu)
    with pytest.raises(ConfigError, match=r"policy\.attention=cpu with an accelerator does not support kv\.dtype=int8"):
        Runtime(config, device=FakeDevice())
