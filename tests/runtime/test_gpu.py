"""On an accelerator: transformers' own tokens, copies that wait for their events, pinned and aligned memory."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from runtime import PrefetchConfig
from runtime.cache.paged import PagedKV
from runtime.cache.pages import KVPages
from runtime.config.settings import Admission, ExpertPaging, Order, Prefetch, Tier
from runtime.plan.placement.kv import ExchangeSize
from runtime.plan.shape.extents import ALIGNMENT_BYTES
from runtime.stream.device import ComputeDevice, CopyPart
from runtime.stream.exchange import HostExchange
from runtime.units import MIB
from tests.runtime.expert_support import lanes_of, load, player
from tests.runtime.gpu_support import CUDA, ON_GPU, on_the_device
from tests.runtime.test_beside import beside
from tests.runtime.test_fidelity import config_for, tokens
from tests.runtime.test_paged import KINDS, LAYERS, Row, attend
from tests.support import Reference

References = Callable[[str], Reference]
pytestmark = ON_GPU
FAMILIES = ("llama", "mixtral")


@pytest.mark.parametrize("resident_layers", [0, 1, None])
@pytest.mark.parametrize("kind", Prefetch)
@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers_on_the_device(
    family: str,
    tier: Tier,
    kind: Prefetch,
    resident_layers: int | None,
    reference: References,
) -> None:
    ref = reference(family)
    prefetch = PrefetchConfig(kind=kind, depth=2, block_layers=2)
    config = config_for(ref, tier=tier, prefetch=prefetch, resident_layers=resident_layers)
    config = replace(config, machine=CUDA)
    assert tokens(config, ref.prompts) == on_the_device(ref)


@pytest.fixture
def device() -> ComputeDevice:
    return ComputeDevice("cuda")


def busy(device: ComputeDevice) -> None:
    """Queues some tens of milliseconds of compute."""
    x = torch.rand(4096, 4096, device=device.torch_device)
    for _ in range(30):
        x = x @ x
        x = x / x.norm()


def test_host_buffers_are_pinned_and_aligned_and_device_buffers_are_on_the_device(device: ComputeDevice) -> None:
    for num_bytes in (1, ALIGNMENT_BYTES, 3 * MIB + 5):
        host = device.host_buffer(num_bytes)
        assert host.is_pinned()
        assert host.data_ptr() % ALIGNMENT_BYTES == 0
        assert host.numel() >= num_bytes
        assert device.compute_buffer(num_bytes).device.type == "cuda"


def test_a_copy_does_not_begin_before_its_slot_is_free(device: ComputeDevice) -> None:
    """Compute that still reads the slot sees the old bytes; what is queued after `ready` sees the new ones."""
    size = 64 * MIB
    slot, source = device.compute_buffer(size), device.host_buffer(size)
    slot.fill_(1)
    source.fill_(2)
    device.wait_for_compute()
    free, ready = device.new_event(), device.new_event()
    busy(device)
    old = slot.clone()
    free.record(device.compute_stream())
    device.copy_ahead([CopyPart(source[:size], slot)], after=free)
    ready.record(device.copy_stream)
    device.compute_waits_for(ready)
    new = slot.clone()
    device.wait_for_compute()
    assert bool((old == 1).all())
    assert bool((new == 2).all())


def test_a_staging_buffer_may_be_rewritten_once_its_copy_has_left(device: ComputeDevice) -> None:
    size = 64 * MIB
    slots, staging = [device.compute_buffer(size) for _ in range(3)], device.host_buffer(size)
    left = device.new_event()
    for value, slot in enumerate(slots):
        left.synchronize()
        staging.fill_(value)
        device.copy_ahead([CopyPart(staging[:size], slot)], after=device.new_event())
        left.record(device.copy_stream)
    left.synchronize()
    assert all(bool((slot == value).all()) for value, slot in enumerate(slots))


def test_a_copy_from_pinned_memory_returns_before_it_is_done(device: ComputeDevice) -> None:
    """Queued behind a compute event that has not happened, it cannot have been waited for."""
    slot, source = device.compute_buffer(MIB), device.host_buffer(MIB)
    busy(device)
    free, ready = torch.Event(device=device.torch_device), torch.Event(device=device.torch_device)
    free.record(device.compute_stream())
    device.copy_ahead([CopyPart(source[:MIB], slot)], after=free)
    ready.record(device.copy_stream)
    assert not ready.query()
    ready.synchronize()
    assert free.query()


def test_a_copy_is_told_of_in_the_hosts_seconds(device: ComputeDevice) -> None:
    """It ran between the call and the end of the wait for it, one after the other, also across two passes."""
    slot, source = device.compute_buffer(64 * MIB), device.host_buffer(64 * MIB)
    told: list[tuple[float, float]] = []
    for number in range(4):
        before = time.monotonic()
        free = device.new_event()
        free.record(device.compute_stream())
        device.copy_ahead(
            [CopyPart(source[: len(slot)], slot)], after=free, then=lambda begin, end: told.append((begin, end))
        )
        assert device.copy_stream is not None
        device.copy_stream.synchronize()
        device.clock.resolve()
        begin, end = told[number]
        assert before - 1e-3 < begin < end < time.monotonic() + 1e-3
    assert len(told) == 4


@pytest.mark.parametrize("tier", [Tier.nvme, Tier.cpu])
@pytest.mark.parametrize("paging", [ExpertPaging.hit, ExpertPaging.all])
def test_experts_copied_one_by_one_give_the_very_numbers_of_whole_layers(
    paging: ExpertPaging, tier: Tier, reference: References
) -> None:
    device = ComputeDevice("cuda")
    loaded = load(reference("qwen3-moe").directory, device)
    lanes = lanes_of(3, 2, 9, device)
    found = []
    for each in (ExpertPaging.off, paging):
        with player(loaded, each, tier=tier, device=device) as played:
            found.append(played.logits(lanes, is_batched=True))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("schedule", [Order.zigzag, Order.cgopipe])
@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma-2", "gpt-oss", "deepseek-v3"])
def test_attention_beside_pinned_pages_does_not_change_tokens(
    family: str,
    admission: Admission,
    schedule: Order,
    reference: References,
) -> None:
    """Prompts in pieces, so that some rows decode beside others that are prefilled."""
    ref = reference(family)
    config = replace(beside(ref, schedule=schedule, admission=admission, chunk=7), machine=CUDA)
    assert tokens(config, ref.prompts) == on_the_device(ref)


def test_a_trip_waits_for_nothing_but_itself(device: ComputeDevice) -> None:
    """It arrives, and its answer is computed with, although compute that came later has hardly begun."""
    with HostExchange(ExchangeSize(num_round_trips=1, round_trip_bytes=MIB), device) as exchange:
        made, out = exchange.new_tensor((64,), torch.float32).fill_(3), exchange.new_tensor((64,), torch.float32)
        round_trip = exchange.send(0, [made], out)
        busy(device)
        behind = torch.Event(device=device.torch_device)
        behind.record(device.compute_stream())
        assert bool((round_trip.wait_for_inputs()[0] == 3).all())
        assert not behind.query()
        round_trip.send_output(torch.full((64,), 5.0))
        assert bool((round_trip.receive() == 5).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["plain", "window", "chunks", "softcap", "sinks"])
def test_attention_on_the_device_equals_plain_attention(kind: str, dtype: torch.dtype, device: ComputeDevice) -> None:
    """Of prompts whole and cut, beside rows that decode: through flash kernels where these apply, else fused."""
    rows = [Row(num_prompt, 4, (8, 2), (64, 64), num_prompt, KINDS[kind]) for num_prompt in (3, 40, 300)]
    cache = PagedKV(KVPages(64, device))
    for _ in rows:
        cache.table.add()
    for new in ([3, 20, 300], [1, 20, 1], [1, 1, 1]):
        cache.begin_pass(new)
        for layer in range(LAYERS):
            runs = list(zip(rows, new, strict=True))
            q, k, v = (
                torch.cat([row.qkv[layer][i][:, row.past : row.past + n] for row, n in runs], 1)[None].to("cuda", dtype)
                for i in range(3)
            )
            wanted = torch.cat([row.expected(layer, n) for row, n in runs])
            found = attend(cache, layer, KINDS[kind], q, k, v).cpu().float()
            torch.testing.assert_close(found, wanted, atol=3e-2, rtol=3e-2)
        cache.end_pass()
        for row, n in runs:
            row.past += n
