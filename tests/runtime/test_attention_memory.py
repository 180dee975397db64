"""The ledger counts what attention takes on an accelerator, each way, and not many times as much; and so it does with
all that a run takes, experts at once included."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime import ModelConfig, OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.attention import device_attention
from runtime.cache.paged import PagedKV
from runtime.cache.pages import KVPages
from runtime.config.settings import DType, Order, PolicyKind, Tier
from runtime.linear import blocks
from runtime.model import expert_groups
from runtime.plan.placement import experts as placement_of_experts
from runtime.plan.placement.memory import PAGE_TOKENS
from runtime.plan.shape import attention
from runtime.plan.shape.attention import AttentionMethod, AttentionSizes, device_attention_bytes
from runtime.stream.device import ComputeDevice
from runtime.units import GIB, KIB, round_up
from tests.attention_doubles import install_flash, refuse_groups
from tests.fake_device import FakeDevice
from tests.live_bytes import LiveBytes
from tests.runtime.test_paged import Kind, attend
from tests.support import synthesize

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, CHUNK = 16, 2, 64, 256
LENGTHS = (500, 130, 90, 40, 300)  # of prompts
KINDS = (Kind(), Kind(sliding_window=100))  # of the model's layers
CAPPED = tuple(Kind(softcap=9.0, sliding_window=kind.sliding_window) for kind in KINDS)


def passes() -> Iterator[list[int]]:
    """Prompts in chunks, row after row, and then one pass that decodes."""
    left = list(LENGTHS)
    while any(left):
        room, new = CHUNK, []
        for row, tokens in enumerate(left):
            new.append(min(room, tokens))
            room, left[row] = room - new[-1], tokens - new[-1]
        yield new
    yield [1] * len(LENGTHS)


def most_taken(kinds: tuple[Kind, ...], dtype: torch.dtype) -> int:
    """By a pass, beside pages and what a layer hands in."""
    cache, peak = PagedKV(KVPages(80, FakeDevice((False,)))), 0
    for _ in LENGTHS:
        cache.table.add()
    with torch.inference_mode():
        for new in passes():
            given = [
                torch.randn(1, heads, sum(new), HEAD_DIM).to(dtype) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
            ]
            pages = [page for layer in range(2) for page in cache._pages.layer(layer, *given[1:])]
            with LiveBytes([*given, *pages]) as live:
                cache.begin_pass(new)
                for layer, kind in enumerate(kinds):
                    attend(cache, layer, kind, *given)
                cache.end_pass()
            peak = max(peak, live.peak)
    return peak


@pytest.mark.dealt("way", "dtype", "gathered")
@pytest.mark.parametrize("gathered", [64 * KIB, GIB], ids=["row by row", "a lane at once"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("way", "kinds"), [(AttentionMethod.flash, KINDS), (AttentionMethod.fused, KINDS), (AttentionMethod.scored, CAPPED)]
)
def test_no_pass_takes_more_than_counted(
    way: AttentionMethod, kinds: tuple[Kind, ...], dtype: torch.dtype, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_groups(monkeypatch)
    if way is AttentionMethod.flash:
        install_flash(monkeypatch, (torch.float32,))
    for module in (device_attention, attention):
        monkeypatch.setattr(module, "GATHERED_BYTES", gathered)
        monkeypatch.setattr(module, "SCORED_BYTES", gathered)
    sizes = AttentionSizes(
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        item_bytes=dtype.itemsize,
        num_rows=len(LENGTHS),
        num_tokens=CHUNK,
        num_positions=sum(round_up(length + 1, PAGE_TOKENS) for length in LENGTHS),
        longest=round_up(max(LENGTHS) + 1, PAGE_TOKENS),
    )
    taken, counted = most_taken(kinds, dtype), device_attention_bytes(way, sizes)
    assert taken <= counted <= 2.5 * taken


@pytest.mark.parametrize(
    ("family", "fused", "flash"),
    [
        ("llama", AttentionMethod.fused, AttentionMethod.flash),
        ("gemma-2", AttentionMethod.scored, AttentionMethod.scored),
        ("gpt-oss", AttentionMethod.scored, AttentionMethod.flash),
    ],
)
def test_a_runtime_counts_the_way_that_its_layers_take(
    family: str, fused: AttentionMethod, flash: AttentionMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RuntimeConfig(model=ModelConfig(path=str(synthesize(family, tmp_path))))
    loaded = Runtime(config, device=FakeDevice()).model
    assert loaded.shape.attention_method is fused
    install_flash(monkeypatch, (torch.float32,))
    assert loaded.for_device(FakeDevice()).shape.attention_method is flash
    assert loaded.for_device(ComputeDevice("cpu")).shape.attention_method is AttentionMethod.host


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("most_visits", [256, 1 << 20], ids=["one by one", "in groups"])
@pytest.mark.parametrize("order", [Order.zigzag, Order.module_batched])
def test_no_run_with_experts_takes_more_than_counted(
    order: Order, most_visits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four lanes of Mixtral's proportions, whose feed-forwards are most of what a lane takes; all weights stay. The
    buffers of panels, which are workspace, are not counted."""
    for module in (expert_groups, placement_of_experts):
        monkeypatch.setattr(module, "GROUPED_VISITS", most_visits)
    path = synthesize("mixtral", tmp_path / "model", hidden_size=128, intermediate_size=448, num_hidden_layers=3)
    config = RuntimeConfig(
        model=ModelConfig(name="test", path=str(path), dtype=DType.bfloat16),
        offload=OffloadConfig(tier=Tier.none),
        policy=PolicyConfig(
            kind=PolicyKind.fixed,
            micro_batch_size=4,
            num_micro_batches=4,
            schedule=order,
            prefill_chunk_tokens=512,
        ),
        sampling=SamplingConfig(max_new_tokens=2, ignore_eos=True),
    )
    runtime = Runtime(config, device=FakeDevice())
    requests = [runtime.request(str(row), [1 + row] * 256) for row in range(16)]
    panels = [
        blocks._buffers.take((blocks.PANEL_BYTES // dtype.itemsize,), dtype, torch.device("cpu"))
        for dtype in (torch.bfloat16, torch.float32)
    ]
    with runtime.open_with_backoff(requests) as (plan, session), LiveBytes(panels) as live:
        assert len(list(session.generate(requests, lambda record: None))) == 16
    device = next(ledger for ledger in plan.placement.ledgers if ledger.memory == "device")
    counted = sum(entry.num_bytes for entry in device.entries if entry.name != "workspace")
    assert live.peak <= counted <= 1.5 * live.peak
