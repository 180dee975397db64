"""On an accelerator: each road that a run may take there gives transformers' tokens, and what only a device can show of
waits, memory, precision and numbers of devices. Runs there behind test_gpu.py: docs/how-to/gpu-first-run.md."""

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from runtime import MachineConfig, ModelConfig, PolicyConfig, Runtime, RuntimeConfig
from runtime.config.settings import Admission, Attention, DType, Order, PolicyKind, Tier
from runtime.model.expert_groups import run_on_device, supports_grouped_mm
from runtime.out_of_memory import is_out_of_memory
from runtime.sequences.sequence import Completion
from runtime.stream.device import ComputeDevice
from runtime.units import MIB
from tests.runtime.combination_support import KINDS, Combination, combinations
from tests.runtime.gpu_support import CUDA, ON_GPU, on_the_device
from tests.runtime.test_beside import beside
from tests.runtime.test_expert_groups import KINDS as EXPERTS
from tests.runtime.test_expert_groups import asked, drawn, plainly
from tests.runtime.test_fidelity import config_for, tokens, tokens_of
from tests.support import NUM_NEW_TOKENS, Reference, synthesize

References = Callable[[str], Reference]
Runtimes = Callable[[RuntimeConfig], Runtime]
pytestmark = ON_GPU
MAPPED_BYTES = 20 * MIB  # torch maps and unmaps large tensors' memory in pages of this size
MOST_ROADS = 8  # of each model, order and attention
GROUPS = [(name, order, way) for name, kind in KINDS.items() for order in kind.orders for way in kind.attentions]


def roads(name: str, order: Order, attention: Attention) -> list[Combination]:
    """Some of those that are not refused, over all tiers, KV tiers, prefetches, pagings and admissions."""
    found = [each for each in combinations(KINDS[name], order, attention) if each.refusal is None]
    return random.Random(f"{name} {order} {attention}").sample(found, min(MOST_ROADS, len(found)))


@pytest.mark.parametrize(("name", "order", "attention"), [group for group in GROUPS if roads(*group)])
def test_no_road_changes_tokens(
    name: str, order: Order, attention: Attention, reference: References, opened: Runtimes
) -> None:
    """Lanes of two, prompts in pieces, and rows that leave their lanes as they end."""
    ref = reference(KINDS[name].family)
    for road in roads(name, order, attention):
        config = replace(road.config(ref.directory), machine=CUDA)
        expected = [row[: config.sampling.max_new_tokens] for row in on_the_device(ref)]
        assert tokens_of(opened(config), ref.prompts) == expected, road


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("attention", Attention)
def test_a_device_is_taken_by_its_number_and_no_other_is_touched(
    attention: Attention, index: int, reference: References
) -> None:
    if index >= torch.cuda.device_count():
        pytest.skip("there is no such device")
    ref, others = reference("mixtral"), [i for i in range(torch.cuda.device_count()) if i != index]
    expected = on_the_device(ref)
    before = [torch.cuda.memory_reserved(other) for other in others]
    config = beside(ref, tier=Tier.nvme) if attention is Attention.cpu else config_for(ref)
    config = replace(config, machine=MachineConfig(device=f"cuda:{index}"))
    assert tokens(config, ref.prompts) == expected
    assert [torch.cuda.memory_reserved(other) for other in others] == before
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_second_session_plans_with_the_memory_of_the_first(family: str, reference: References) -> None:
    """torch keeps what the first has freed, and the driver counts that as taken."""
    ref = reference(family)
    runtime = Runtime(replace(config_for(ref, resident_layers=None), machine=CUDA))
    requests = [runtime.request(str(number), prompt) for number, prompt in enumerate(ref.prompts)]
    budgets = []
    for _ in range(2):
        runtime.generate(ref.prompts)
        budgets.append(runtime.budgets().device_bytes)
    assert requests
    assert budgets[1] >= budgets[0] - 64 * MIB


def test_what_torch_keeps_counts_as_free_and_can_be_given_back() -> None:
    """But for what shares a page with tensors that are still there, at either end."""
    device = ComputeDevice("cuda")
    held = device.compute_buffer(256 * MIB)
    taken = device.free_bytes()
    del held
    assert device.free_bytes() >= taken + 256 * MIB
    reserved = torch.cuda.memory_reserved()
    device.empty_caches()
    assert torch.cuda.memory_reserved() <= reserved - (256 * MIB - 2 * MAPPED_BYTES)


def test_a_device_that_is_full_is_understood() -> None:
    with pytest.raises(RuntimeError) as raised:
        ComputeDevice("cuda").compute_buffer(1 << 50)
    assert is_out_of_memory(raised.value)


def test_by_itself_a_run_computes_in_what_the_device_has_units_for(reference: References) -> None:
    """The checkpoint is in bfloat16, for which there are none before compute capability 8."""
    ref = reference("llama")
    runtime = Runtime(RuntimeConfig(model=ModelConfig(name="test", path=str(ref.directory)), machine=CUDA))
    has_units = torch.cuda.get_device_capability() >= (8, 0)
    assert runtime.model.compute_dtype == (torch.bfloat16 if has_units else torch.float16)
    found = runtime.generate(ref.prompts)
    assert all(isinstance(each, Completion) and each.token_ids for each in found)


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("num_tokens", [1, 7, 90])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2), (torch.float16, 1e-2)])
def test_experts_at_once_give_the_sum_of_the_plain_loop(
    dtype: torch.dtype, close: float, num_tokens: int, kind: str
) -> None:
    """Grouped where this device has the kernel, in a product for each where not."""
    module, given = drawn(EXPERTS[kind], dtype), asked(num_tokens, dtype)
    expected = plainly(module, *given)
    found = run_on_device(module.cuda(), *(tensor.cuda() for tensor in given))
    assert found is not None
    torch.testing.assert_close(found.cpu(), expected, atol=close, rtol=close)


@pytest.mark.parametrize(("dtype", "num_tokens"), [(torch.bfloat16, 64), (torch.float32, 16)])
def test_grouped_experts_ask_nothing_of_the_device(dtype: torch.dtype, num_tokens: int) -> None:
    """Few tokens go by all experts where there is no kernel for groups."""
    module, given = drawn(EXPERTS["mixtral"], dtype).cuda(), [t.cuda() for t in asked(num_tokens, dtype)]
    is_few = num_tokens * 24 <= 1024
    if not is_few and not supports_grouped_mm([module.gate_up_proj.mT]):  # pyright: ignore[reportArgumentType, reportCallIssue]
        pytest.skip("this device has no kernel for them")
    run_on_device(module, *given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_on_device(module, *given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def num_waits(directory: Path, dtype: DType, num_new_tokens: int) -> int:
    """Of the host for the device, in a run of two lanes, as torch counts them."""
    config = config_for(Reference(directory=directory, prompts=[], expected=[], sampled=[]), tier=Tier.none)
    config = replace(
        config,
        model=replace(config.model, dtype=dtype),
        offload=replace(config.offload, resident_layers=None),
        policy=replace(config.policy, micro_batch_size=2, num_micro_batches=2),
        sampling=replace(config.sampling, max_new_tokens=num_new_tokens),
        machine=CUDA,
    )
    runtime, prompts = Runtime(config), [[5 + i, 6, 7] for i in range(4)]
    runtime.generate(prompts)  # what is done once
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            runtime.generate(prompts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in told)


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_waits_of_a_decode_pass_do_not_grow_with_layers(dtype: DType, tmp_path: Path) -> None:
    """Only the sampler asks for numbers: once in a lane and pass."""
    waits = {}
    for num_layers in (2, 6):
        directory = synthesize("llama", tmp_path / str(num_layers), num_hidden_layers=num_layers)
        waits[num_layers] = num_waits(directory, dtype, 12) - num_waits(directory, dtype, 4)
    assert waits[2] == waits[6] <= 8 * 2 * 2, "of 8 passes more, with two lanes each"


@pytest.mark.skipif(find_spec("triton") is None, reason="the compiler is not there")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_compiled_steps_give_the_tokens_of_plain_ones(family: str, reference: References) -> None:
    """In float32. Takes some seconds for each kind of step: it compiles."""
    ref = reference(family)
    config = replace(config_for(ref), machine=CUDA)
    assert tokens(replace(config, model=replace(config.model, compile=True)), ref.prompts) == on_the_device(ref)


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "gpt-oss"])
def test_replayed_passes_give_the_tokens_of_launched_ones(family: str, dtype: DType, reference: References) -> None:
    """In bfloat16 by flash kernels, whose rows hang on a hair: half of them at least."""
    ref = reference(family)
    policy = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=8, num_micro_batches=1)
    config = replace(config_for(ref, tier=Tier.none, resident_layers=None, policy=policy), machine=CUDA)
    models = (replace(config.model, dtype=dtype, graphs=graphs) for graphs in (False, True))
    launched, replayed = (tokens(replace(config, model=model), ref.prompts) for model in models)
    equal = sum(one == other for one, other in zip(launched, replayed, strict=True))
    assert equal == len(ref.prompts) if dtype is DType.float32 else equal >= len(ref.prompts) / 2


def test_a_second_session_records_its_passes_too(reference: References, caplog: pytest.LogCaptureFixture) -> None:
    ref = reference("llama")
    policy = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=8, num_micro_batches=1)
    config = replace(config_for(ref, tier=Tier.none, resident_layers=None, policy=policy), machine=CUDA)
    runtime = Runtime(replace(config, model=replace(config.model, graphs=True)))
    first, second = (tokens_of(runtime, ref.prompts) for _ in range(2))
    assert first == second == on_the_device(ref)
    assert "cannot be recorded" not in caplog.text


@pytest.mark.parametrize("admission", Admission)
def test_a_row_alone_gets_the_tokens_that_it_gets_in_company(admission: Admission, reference: References) -> None:
    ref = reference("llama")
    config = replace(config_for(ref, tier=Tier.cpu), machine=CUDA)
    config = replace(config, policy=replace(config.policy, admission=admission))
    expected = on_the_device(ref)
    assert len(expected[0]) == NUM_NEW_TOKENS
    assert [tokens(config, [prompt])[0] for prompt in ref.prompts[:2]] == expected[:2]
