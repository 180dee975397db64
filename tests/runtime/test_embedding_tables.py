"""Passes read the rows of embedding tables that they look up, and no others; tokens are those of whole tables."""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM

from runtime import ModelConfig, OffloadConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import DType, Tier
from runtime.engine.records import PassRecord
from runtime.engine.tables import plan_blocks
from runtime.errors import StorageError
from runtime.model.loading import load_model
from runtime.plan.placement.defaults import gather_tables
from runtime.plan.placement.placement import Budgets
from runtime.plan.shape.extents import ALIGNMENT_BYTES
from runtime.probing.meta import build_meta_model
from runtime.probing.tables import find_tables
from runtime.sequences.sequence import Request
from runtime.store import reader as reader_module
from runtime.units import GIB
from tests.dealt import with_slow_others
from tests.fake_device import FakeDevice
from tests.model_type_verdict import Outcome, judge
from tests.runtime.test_fidelity import config_for, tokens_of
from tests.support import Reference, synthesize

References = Callable[[str], Reference]
Read = Callable[[int, Sequence[memoryview], int], int]
EMBEDDING = "model.embed_tokens.weight"
NUM_TESTED = 40
HIDDEN = 64
UNIT = ALIGNMENT_BYTES


def gathered(config: RuntimeConfig, *, is_gathered: bool | None = True) -> RuntimeConfig:
    return replace(config, offload=replace(config.offload, gather_tables=is_gathered))


def requested(runtime: Runtime, row: int, prompt: list[int]) -> Request:
    request = runtime.request(str(row), prompt)
    assert isinstance(request, Request)
    return request


@pytest.mark.parametrize("size", [32, 100, 4096, 5000, 12288])
@pytest.mark.parametrize("offset", [0, 4090, 8192])
def test_every_row_is_read_and_no_block_twice(size: int, offset: int) -> None:
    numbers = torch.randperm(1000, generator=torch.Generator().manual_seed(size))[:NUM_TESTED].sort().values.numpy()
    content = np.random.default_rng(0).integers(0, 256, offset + 1000 * size, dtype=np.uint8)
    extents, slots = plan_blocks("file", offset + numbers * size, size)
    blocks = [(e.offset + begin) // UNIT for e in extents for begin in range(0, e.num_bytes, UNIT)]
    assert len(blocks) == len({*blocks})
    wanted = {at // UNIT for n in numbers for at in range(offset + n * size, offset + n * size + size)}
    assert {*blocks} == wanted
    buffer = np.zeros(sum(extent.num_bytes for extent in extents), dtype=np.uint8)
    for extent in extents:
        assert extent.offset % UNIT == extent.slot_offset % UNIT == 0
        used = content[extent.offset : extent.offset + extent.used_bytes]
        assert len(used) == extent.used_bytes <= extent.num_bytes  # the file may end behind the last row
        buffer[extent.slot_offset : extent.slot_offset + extent.used_bytes] = used
    for number, slot in zip(numbers, slots, strict=True):
        begin = offset + number * size
        assert (buffer[slot : slot + size] == content[begin : begin + size]).all()


@pytest.mark.parametrize("tier", [Tier.nvme, Tier.auto])
@pytest.mark.parametrize("family", ["llama", "llama, tied", "gpt2", "gemma-2", "mixtral"])
def test_tokens_are_those_of_transformers(family: str, tier: Tier, reference: References) -> None:
    ref = reference(family)
    runtime = Runtime(gathered(config_for(ref, tier=tier, resident_layers=0 if tier is Tier.nvme else None)))
    assert runtime.model.shape.tables
    assert tokens_of(runtime, ref.prompts) == ref.expected


def test_an_accelerator_gets_the_same(reference: References) -> None:
    ref = reference("gpt2")
    runtime = Runtime(gathered(config_for(ref, tier=Tier.nvme)), device=FakeDevice())
    assert len(runtime.model.shape.tables) == 2
    assert tokens_of(runtime, ref.prompts) == ref.expected


@pytest.mark.parametrize(
    "name",
    with_slow_others(("qwen4_exp_text (n-grams)", "gemma3n_text", "gemma4_text"), ("qwen4_exp_text (n-grams)",)),
)
def test_tables_in_and_beside_layers_are_gathered_exactly(name: str) -> None:
    verdict = judge(name, gather_tables=True)
    assert verdict.outcome is Outcome.exact, verdict


def test_a_pass_reads_the_blocks_of_its_rows(tmp_path: Path) -> None:
    path = synthesize("llama", tmp_path / "model", vocab_size=4096)
    runtime = Runtime(
        RuntimeConfig(
            model=ModelConfig(path=str(path), dtype=DType.float32),
            offload=OffloadConfig(tier=Tier.auto, gather_tables=True, cache_dir=str(tmp_path)),
            sampling=SamplingConfig(max_new_tokens=5, ignore_eos=True),
        )
    )
    [table] = runtime.model.shape.tables
    [[source]] = table.pieces
    assert table.name == EMBEDDING
    prompts = [[3, 900, 3, 17], [900, 1800, 4095, 0]]
    requests = [requested(runtime, row, prompt) for row, prompt in enumerate(prompts)]
    records = list[PassRecord]()
    with runtime.open_with_backoff(requests) as (plan, session):
        found = dict(session.generate(requests, records.append))
    assert not plan.placement.walk.streamed  # all that passes read is rows

    def num_bytes(ids: list[int]) -> int:
        begins = source.offset + np.unique(ids) * table.row_bytes
        extents, _ = plan_blocks(source.file, begins, table.row_bytes)
        end = Path(source.file).stat().st_size
        return sum(min(extent.num_bytes, end - extent.offset) for extent in extents)

    assert records[0].times.bytes_read_disk == num_bytes([id for prompt in prompts for id in prompt])
    for index, record in enumerate(records[1:]):
        assert record.times.bytes_read_disk == num_bytes([found[row].token_ids[index] for row in range(2)])


def test_a_table_that_is_used_otherwise_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.from_pretrained(synthesize("llama", tmp_path))
    assert find_tables(build_meta_model(config, torch.float32)) == {EMBEDDING: 1.0}
    forward = LlamaForCausalLM.forward

    def scaled(self: LlamaForCausalLM, *args: object, **kwargs: object) -> object:
        self.model.embed_tokens.weight.abs().mean()
        return forward(self, *args, **kwargs)  # pyright: ignore[reportArgumentType, reportCallIssue]

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    assert find_tables(build_meta_model(config, torch.float32)) == {}


def test_a_table_that_no_token_looks_up_is_none(tmp_path: Path) -> None:
    model = build_meta_model(AutoConfig.from_pretrained(synthesize("llama", tmp_path)), torch.float32)
    model.unused = nn.Embedding(10, HIDDEN, device="meta")
    assert find_tables(model) == {EMBEDDING: 1.0}


@pytest.mark.parametrize(
    ("tier", "setting", "is_gathered"),
    [
        (Tier.auto, None, True),
        (Tier.nvme, None, True),
        (Tier.none, None, False),
        (Tier.nvme, False, False),
        (Tier.none, True, True),
    ],
)
def test_tables_are_gathered_if_the_weights_exceed_memory(
    tier: Tier, setting: bool | None, is_gathered: bool, tmp_path: Path
) -> None:
    path = synthesize("llama", tmp_path / "model", vocab_size=1 << 17)
    whole = load_model(ModelConfig(path=str(path)), torch.device("cpu"), str(tmp_path)).shape
    offload, half = OffloadConfig(tier=tier, gather_tables=setting), whole.weight_bytes // 2
    for spare in (-1, 0):
        shape = gather_tables(whole, offload, Budgets(host_bytes=half, device_bytes=half + spare))
        assert bool(shape.tables) == (is_gathered if spare else bool(setting))
    small = whole.gather_tables(min_bytes=GIB)  # small tables are cheaper as a whole
    assert not small.tables


def test_memory_without_the_table_is_planned(tmp_path: Path) -> None:
    """A table of many times the layers is in no entry of the ledger but its rows'."""
    path = synthesize("llama", tmp_path / "model", vocab_size=1 << 16)
    totals = dict[bool, int]()
    for is_gathered in (False, True):
        config = RuntimeConfig(
            model=ModelConfig(path=str(path)),
            offload=OffloadConfig(tier=Tier.auto, gather_tables=is_gathered, cache_dir=str(tmp_path)),
        )
        runtime = Runtime(config)
        plan = runtime.plan([requested(runtime, 0, [1, 2, 3])])
        [ledger] = plan.placement.ledgers
        entries = {entry.name: entry.num_bytes for entry in ledger.entries}
        assert ("table rows" in entries) == is_gathered
        totals[is_gathered] = entries["resident weights"]
    table_bytes = (1 << 16) * HIDDEN * 2
    assert totals[False] - totals[True] == pytest.approx(table_bytes, abs=64 * 1024)


@pytest.mark.parametrize("times", [2, 1000])
def test_a_row_that_cannot_be_read_names_the_file(
    times: int, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that passes is waited out; one that stays ends the run resumably."""
    monkeypatch.setattr(reader_module, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    ref = reference("llama")
    runtime = Runtime(gathered(config_for(ref, tier=Tier.auto, resident_layers=None)))
    [table] = runtime.model.shape.tables
    [[source]] = table.pieces
    real: Read = os.preadv
    failed = list[int]()

    def preadv(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        is_in_file = Path(f"/proc/self/fd/{descriptor}").readlink() == Path(source.file)
        is_in_table = source.offset <= offset < source.offset + source.num_bytes
        if is_in_file and is_in_table and len(failed) < times:
            failed.append(offset)
            raise OSError(errno.EIO, "input/output error")
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    if times == 2:
        assert tokens_of(runtime, ref.prompts) == ref.expected
        assert len(failed) == 2
    else:
        with pytest.raises(StorageError, match=f"{Path(source.file).name}.*reading"):
            tokens_of(runtime, ref.prompts)
