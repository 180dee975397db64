"""DeepSeek-V4 is read as it is published: names of its own, FP8 with factors in powers of two, experts in MXFP4."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.config.settings import ModelConfig, Tier
from runtime.model.loading import load_model
from tests.quantized import Tensors, block_maxima, spread, tensors_in, to_mxfp4, write_checkpoint
from tests.runtime.test_fidelity import config_for, tokens
from tests.support import NUM_NEW_TOKENS, Reference, greedy
from tests.tiny_checkpoints import save_tiny
from tests.tiny_configs import tiny_config

BLOCK = (32, 32)
EXPERTS = r"\.ffn\.experts\.\d+\.w[123]\.weight$"
FP8 = r"\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\.shared_experts\.w[123])\.weight$"
METHOD = {
    "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}  # fmt: skip
PUBLISHED = {  # names, as transformers saves them: as they are published
    r"^model\.embed_tokens\.": "embed.", r"^model\.hc_head\.hc_": "hc_head_", r"^model\.": "",
    r"\.attn\.norm\.": ".attn.kv_norm.",
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(as published, the same numbers in float32)"""
    home = tmp_path_factory.mktemp("v4")
    config = tiny_config("deepseek_v4")
    config.moe_intermediate_size = 64  # MXFP4 needs a multiple of 32
    config.o_lora_rank, config.o_groups = 16, 2
    torch.manual_seed(0)
    save_tiny(AutoModelForCausalLM.from_config(config), home / "source")
    published: Tensors = {}
    plain: Tensors = {}
    for saved_name, tensor in tensors_in(home / "source").items():
        name = saved_name
        for pattern, other in PUBLISHED.items():
            name = re.sub(pattern, other, name)
        scale = name.removesuffix("weight") + "scale"
        if re.search(EXPERTS, name):
            blocks, exponents = to_mxfp4(tensor.float()[None])
            plain[saved_name] = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)[0].T.contiguous()
            published |= {name: blocks[0].flatten(1).view(torch.int8), scale: exponents[0].view(torch.float8_e8m0fnu)}
        elif re.search(FP8, name):
            factors = (block_maxima(tensor.float(), BLOCK) / 448).log2().ceil().exp2()
            numbers = (tensor.float() / spread(factors, BLOCK, tensor.shape)).to(torch.float8_e4m3fn)
            plain[saved_name] = numbers.float() * spread(factors, BLOCK, tensor.shape)
            published |= {name: numbers, scale: factors.to(torch.float8_e8m0fnu)}
        else:
            published[name] = plain[saved_name] = tensor
    return (
        write_checkpoint(
            home / "source", home / "published", published, num_shards=2, quantization_config=METHOD, expert_dtype="fp4"
        ),
        write_checkpoint(home / "source", home / "plain", plain),
    )


@pytest.mark.slow("runtime/test_deepseek_v4_files.py::test_experts_take_four_bits_and_scales")
@pytest.mark.parametrize("tier", [Tier.nvme, Tier.none])
def test_tokens_are_those_of_the_unquantised_numbers(written: tuple[Path, Path], tier: Tier) -> None:
    published, plain = written
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    prompts = [[5, 9, 200, 31], [17] * 9 + [300]]
    expected = [greedy(model, prompt, NUM_NEW_TOKENS) for prompt in prompts]
    reference = Reference(directory=published, prompts=[], expected=[], sampled=[])
    assert tokens(config_for(reference, tier=tier), prompts) == expected


def test_experts_take_four_bits_and_scales(written: tuple[Path, Path], tmp_path: Path) -> None:
    config = ModelConfig(name="test", path=str(written[0]))
    shape = load_model(config, torch.device("cpu"), str(tmp_path)).shape
    experts = [p for stage in shape.stages for p in stage.parameters if p.is_experts]
    assert experts
    assert all(p.num_bytes == p.num_elements * 17 / 32 for p in experts)
