"""Ranks come to the completions of one process where weights are rounded as they are read and stay, and where a
structure binds what comes behind reasoning."""

from pathlib import Path
from typing import TypeAlias

import pytest

from runtime import ModelConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import DevicesConfig, DType, Parallelism, PolicyKind, Quantize
from runtime.ranks.ranks import Ranks
from tests.rank_processes import in_ranks
from tests.support import synthesize

Said: TypeAlias = list[tuple[list[int], str, str | None]]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SIZES = {**HEADS, "hidden_size": 128, "intermediate_size": 192}
POLICY = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=2)


def said(runtime: Runtime, prompts: list[list[int] | str]) -> Said:
    found = runtime.generate(prompts)
    assert all(each.error is None for each in found), found
    return [(list(each.token_ids), each.text, each.reasoning) for each in found]


def in_each_way(ranks: Ranks, asked: list[tuple[RuntimeConfig, list[list[int] | str]]]) -> list[Said]:
    found = list[Said]()
    for ranks.devices in (
        DevicesConfig(way=way) for way in (Parallelism.sharded, Parallelism.tensor, Parallelism.pipeline)
    ):
        found += [said(Runtime(config, ranks=ranks), prompts) for config, prompts in asked]
    return found


def test_every_way_comes_to_the_completions_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    path = synthesize("llama", tmp_path / "model", **SIZES)
    rounded = RuntimeConfig(
        model=ModelConfig(name="test", path=str(path), dtype=DType.float32, quantize=Quantize.int8),
        policy=POLICY,
        sampling=SamplingConfig(max_new_tokens=6, ignore_eos=True),
    )
    thinking = RuntimeConfig(
        model=ModelConfig(name="random"),
        policy=POLICY,
        sampling=SamplingConfig(max_new_tokens=60, reasoning=["<think>", " bani"], choice=["yes please", "no"]),
    )
    asked: list[tuple[RuntimeConfig, list[list[int] | str]]] = [
        (rounded, [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]),
        (thinking, ["Think: <think>", "Say <think>", "A"]),
    ]
    expected = [said(Runtime(config), prompts) for config, prompts in asked]
    assert {text for _, text, _ in expected[1]} <= {"yes please", "no"}
    assert [reasoning is not None for _, _, reasoning in expected[1]] == [True, True, False]
    for found in in_ranks(2, in_each_way, asked):
        assert found == expected * 3
