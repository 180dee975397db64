"""Models whose every mixture layer is larger than all the memory they are given: 160 and 512 experts, one by one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from runtime import ModelConfig, OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import Admission, Attention, DType, ExpertPaging, MachineConfig, Order, PolicyKind, Tier
from runtime.engine.records import PassRecord, Phase
from runtime.plan.placement.experts import ExpertPages, dense_shape, expected_hits
from runtime.plan.placement.memory import GROUPED_BYTES
from runtime.plan.planner import RunPlan
from runtime.plan.shape.extents import slot_layout
from runtime.plan.shape.shapes import Stage
from runtime.requests.prompts import Rejected
from runtime.sequences.sequence import Completion, Request
from runtime.stream.experts import ExpertStream
from runtime.units import GIB
from tests.support import MANY_EXPERTS, Reference, clear_answer, transformers_model

Checkpoints = Callable[[str], Path]
PROMPT_LENGTHS, NUM_NEW_TOKENS = (5, 17, 3), 4


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What `transformers.generate` makes of some prompts, each alone."""

    directory: Path
    prompts: list[list[int]]
    tokens: list[list[int]]


@pytest.fixture(scope="module", params=MANY_EXPERTS)
def expected(request: pytest.FixtureRequest, many_experts: Checkpoints) -> Expected:
    directory, generator = many_experts(request.param), torch.Generator().manual_seed(0)
    model = transformers_model(directory)
    clear = [clear_answer(model, length, generator) for length in PROMPT_LENGTHS]
    prompts, tokens = [prompt for prompt, _ in clear], [answer[:NUM_NEW_TOKENS] for _, answer in clear]
    assert len({token for row in tokens for token in row}) > 8, "a model that says little proves little"
    return Expected(directory=directory, prompts=prompts, tokens=tokens)


def config_for(directory: Path, paging: ExpertPaging, policy: PolicyConfig) -> RuntimeConfig:
    """Products this small are slower on two threads."""
    return RuntimeConfig(
        model=ModelConfig(name="test", path=str(directory), dtype=DType.float32),
        offload=OffloadConfig(tier=Tier.nvme, resident_layers=0, expert_paging=paging),
        policy=policy,
        sampling=SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True),
        machine=MachineConfig(num_threads=1),
    )


def policy_for(num_lanes: int, lane_size: int, order: Order, attention: Attention = Attention.device) -> PolicyConfig:
    return PolicyConfig(
        kind=PolicyKind.fixed,
        num_micro_batches=num_lanes,
        micro_batch_size=lane_size,
        schedule=order,
        attention=attention,
    )


def with_budget(config: RuntimeConfig, host_bytes: int) -> RuntimeConfig:
    return replace(config, offload=replace(config.offload, host_memory_gib=host_bytes / GIB, resident_layers=None))


def requests_of(runtime: Runtime, prompts: Sequence[Sequence[int]]) -> list[Request]:
    made = [runtime.request(str(n), prompt) for n, prompt in enumerate(prompts)]
    return [request for request in made if not isinstance(request, Rejected)]


def layer_bytes(runtime: Runtime) -> int:
    """Of the smallest layer with experts."""
    return min(stage.num_bytes for stage in runtime.model.shape.layers if stage.experts)


def tensor_bytes(stage: Stage) -> int:
    return stage.num_bytes


def disk_bytes(stage: Stage) -> int:
    return slot_layout(stage).num_bytes


def decode_passes(runtime: Runtime, requests: list[Request]) -> tuple[RunPlan, list[PassRecord]]:
    """Three."""
    records: list[PassRecord] = []
    requests = [replace(request, max_new_tokens=4) for request in requests]
    with runtime.open_with_backoff(requests) as (plan, session):
        for block in plan.blocks:
            session.run(block, requests, records.append)
    return plan, [record for record in records if record.phase is Phase.decode]


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(
    ("paging", "order", "admission"),
    [
        (ExpertPaging.hit, Order.zigzag, Admission.wave),
        (ExpertPaging.hit, Order.module_batched, Admission.continuous),
        (ExpertPaging.all, Order.zigzag, Admission.continuous),
        (ExpertPaging.all, Order.module_batched, Admission.wave),
        (ExpertPaging.auto, Order.module_batched, Admission.wave),
    ],
)
def test_tokens_equal_transformers_in_less_memory_than_one_layer(
    paging: ExpertPaging, order: Order, admission: Admission, expected: Expected
) -> None:
    """The ledger counts everything: slots, KV, activations and slack. Three sequences hit far fewer than all experts,
    so `auto` is `hit`; the process, too, stays below one layer."""
    policy = replace(policy_for(2, 2, order), admission=admission)
    config = config_for(expected.directory, paging, policy)
    one_layer = layer_bytes(Runtime(config))
    runtime = Runtime(with_budget(config, one_layer - 1))
    plan = runtime.plan(requests_of(runtime, expected.prompts))
    assert [ledger.total_bytes < one_layer for ledger in plan.placement.ledgers] == [True]
    assert plan.placement.paging is (ExpertPaging.all if paging is ExpertPaging.all else ExpertPaging.hit)
    results = runtime.generate(expected.prompts)
    assert [list(r.token_ids) for r in results if isinstance(r, Completion)] == expected.tokens
    runtime.require_within_budget(plan)


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize(("order", "num_lanes"), [(Order.zigzag, 1), (Order.module_batched, 4)])
@pytest.mark.parametrize("family", MANY_EXPERTS)
def test_a_decode_pass_reads_the_experts_that_are_hit_and_no_more(
    family: str, order: Order, num_lanes: int, many_experts: Checkpoints
) -> None:
    """Routers hit about as many as an even choice would: of few sequences far fewer than all, of many nearly all."""
    for num_sequences in (1, 8, 64):
        policy = policy_for(num_lanes, -(-num_sequences // num_lanes), order)
        runtime = Runtime(config_for(many_experts(family), ExpertPaging.hit, policy))
        plan, passes = decode_passes(runtime, requests_of(runtime, [[7 + n, 600 - n] for n in range(num_sequences)]))
        shape, paged = runtime.model.shape, plan.placement.paged
        layers, pages = [shape.stages[stage] for stage in paged], ExpertPages.from_shape(shape, paged).pages
        dense = [dense_shape(shape, paged).stages[stage] for stage in plan.placement.walk.streamed]
        even = sum(expected_hits(s.num_experts, s.num_experts_per_token, num_sequences) for s in layers)
        for times in [record.times for record in passes]:
            assert times.experts_total == sum(stage.num_experts for stage in layers) == len(pages)
            assert times.experts_hit == times.experts_read
            assert 0.5 * even <= times.experts_hit <= 1.15 * even
            counted = (tensor_bytes, disk_bytes)  # what is in tensors, and in whole blocks of the disk
            least, most = (sum(map(b, dense)) + times.experts_read * max(map(b, pages)) for b in counted)
            assert least <= times.bytes_read_disk <= most


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize(
    ("num_sequences", "num_lanes", "order", "layers_fit", "chosen"),
    [
        (1, 1, Order.zigzag, True, ExpertPaging.hit),
        (8, 1, Order.zigzag, False, ExpertPaging.hit),
        (64, 1, Order.zigzag, True, ExpertPaging.off),  # nearly all are hit: better in one run
        (64, 1, Order.zigzag, False, ExpertPaging.all),  # and with no room for that, without waiting for the router
        (32, 8, Order.zigzag, True, ExpertPaging.off),  # eight lanes would read their own hits each
        (32, 8, Order.module_batched, True, ExpertPaging.hit),
    ],
)
def test_auto_reads_what_is_least_in_the_memory_there_is(
    num_sequences: int, num_lanes: int, order: Order, layers_fit: bool, chosen: ExpertPaging, many_experts: Checkpoints
) -> None:
    policy = policy_for(num_lanes, num_sequences // num_lanes, order)
    config = config_for(many_experts("glm-4-moe"), ExpertPaging.auto, policy)
    runtime = Runtime(config)
    if not layers_fit:
        runtime = Runtime(with_budget(config, layer_bytes(runtime) + GROUPED_BYTES // 2))
    plan = runtime.plan(requests_of(runtime, [[7, 8, 9]] * num_sequences))
    assert plan.placement.paging is chosen
    assert bool(plan.placement.paged) == (chosen is not ExpertPaging.off)


@pytest.fixture
def asked_of_experts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is asked of every stream of experts, in order: its name and the stage."""
    asked: list[tuple[str, int]] = []

    def listen(name: str) -> None:
        plain = getattr(ExpertStream, name)

        def told(stream: ExpertStream, stage: int, *hit: Sequence[int]) -> object:
            asked.append((name, stage))
            return plain(stream, stage, *hit)

        monkeypatch.setattr(ExpertStream, name, told)

    listen("prefetch")
    listen("experts")
    return asked


def test_experts_expected_while_the_cpu_attends_are_those_that_are_asked_for_next(
    reference: Callable[[str], Reference], asked_of_experts: list[tuple[str, int]]
) -> None:
    """In cgopipe's order lanes enter a layer while others have yet to ask for the experts of the one before: what is on
    its way for them must not be dropped."""
    ref, bytes_read = reference("qwen3-moe"), []
    for order, attention in [(Order.zigzag, Attention.device), (Order.cgopipe, Attention.cpu)]:
        policy = policy_for(3, 3, order, attention)
        runtime = Runtime(config_for(ref.directory, ExpertPaging.all, policy))
        asked_of_experts.clear()
        _, passes = decode_passes(runtime, requests_of(runtime, ref.prompts))
        pairs = pairwise(asked_of_experts)
        assert all(before == ("prefetch", stage) for before, (name, stage) in pairs if name == "experts")
        bytes_read.append([record.times.bytes_read_disk for record in passes[1:]])
    assert bytes_read[0] == bytes_read[1]
