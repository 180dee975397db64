"""Experts that run once for all lanes give each lane what it gets alone, wherever their matrices lie."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from runtime.checkpoint_source.location import GGUF_READER
from runtime.config.settings import ExpertPaging
from runtime.model.experts import is_experts
from runtime.model.loading import LoadedModel
from runtime.plan.placement.experts import pageable_stages
from tests.gguf_files import Type, write_gguf
from tests.quantized import write_fp8, write_mxfp4
from tests.runtime.expert_support import lanes_of, load, player, unpageable_stacks
from tests.support import synthesize

LANES = lanes_of(3, 2, 9)
CLOSE = 2e-5  # of fp32 sums in another order, over four layers
PAGINGS = (ExpertPaging.hit, ExpertPaging.all)
FAMILIES = ("mixtral", "gpt-oss", "qwen2-moe", "deepseek-v3", "jamba", "minimax-m2")
MIXTURE = {"moe_intermediate_size": 64}
QUANTISED, PLAIN = 0, 1
GGUF_TYPES = {"gate_inp": Type.F32, "down": Type.Q8_0, "": Type.Q4_0}
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "matrix by matrix, bf16": lambda d: synthesize("qwen3-moe", d / "model", **MIXTURE),
    "matrix by matrix, fp32": lambda d: write_fp8(synthesize("qwen3-moe", d / "a", **MIXTURE), d, (24, 64))[PLAIN],
    "matrix by matrix, fp8": lambda d: write_fp8(synthesize("qwen3-moe", d / "a", **MIXTURE), d, (24, 64))[QUANTISED],
    "transposed stacks, bf16": lambda d: synthesize("gpt-oss", d / "model"),
    "transposed stacks, fp32": lambda d: write_mxfp4(synthesize("gpt-oss", d / "a"), d)[PLAIN],
    "transposed stacks, mxfp4": lambda d: write_mxfp4(synthesize("gpt-oss", d / "a"), d, num_shards=2)[QUANTISED],
    "stacks, gguf": lambda d: write_gguf(
        synthesize("qwen3-moe", d / "a", **MIXTURE),
        d / "m.gguf",
        {"gate_inp": Type.F32, "down": Type.Q8_0, "": Type.Q4_0},
    ),
}


def logits(loaded: LoadedModel, paging: ExpertPaging, *, is_batched: bool, num_slots: int = 2) -> list[torch.Tensor]:
    with player(loaded, paging, num_slots=num_slots) as played:
        return played.logits(LANES, is_batched=is_batched)


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, some, others))


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_lanes_that_share_their_experts_get_what_they_get_alone(family: str, tmp_path: Path) -> None:
    loaded = load(synthesize(family, tmp_path / "model"))
    alone = logits(loaded, ExpertPaging.off, is_batched=False)
    for mine, shared in zip(alone, logits(loaded, ExpertPaging.off, is_batched=True), strict=True):
        torch.testing.assert_close(shared, mine, atol=CLOSE, rtol=CLOSE)


def test_experts_of_a_transformers_that_knows_no_norm_behind_them_run_too(tmp_path: Path) -> None:
    """The decorator of 5.17 sets no `has_post_expert_norm`."""
    loaded = load(synthesize("mixtral", tmp_path / "model"))
    expected = logits(loaded, ExpertPaging.off, is_batched=False)
    for streamed in loaded.staged.modules:
        for module in filter(is_experts, streamed.inner.modules()):
            vars(module).pop("has_post_expert_norm", None)
    assert are_equal(logits(loaded, ExpertPaging.off, is_batched=False), expected)


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("stored", [name for name in CHECKPOINTS if "gguf" not in name or find_spec(GGUF_READER)])
def test_paged_experts_give_the_very_numbers_of_whole_layers(stored: str, tmp_path: Path) -> None:
    """Products have the same shapes, so not a bit may differ."""
    loaded = load(CHECKPOINTS[stored](tmp_path))
    assert pageable_stages(loaded.shape)
    assert not unpageable_stacks(loaded.shape)
    for is_batched in (False, True):
        whole = logits(loaded, ExpertPaging.off, is_batched=is_batched)
        for paging, num_slots in zip(PAGINGS, (2, 3), strict=True):
            assert are_equal(logits(loaded, paging, is_batched=is_batched, num_slots=num_slots), whole)
