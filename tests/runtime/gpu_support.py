"""What tests on a CUDA device have in common."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime import MachineConfig
from tests.support import NUM_NEW_TOKENS, NUM_SAMPLED, Reference, sampled

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = MachineConfig(device="cuda")


def on_the_device(ref: Reference) -> list[list[int]]:
    """transformers' greedy tokens on the device itself: its products round otherwise than a CPU's."""
    return _tokens(str(ref.directory), tuple(map(tuple, ref.prompts)))


def sampled_on_the_device(ref: Reference) -> list[list[int]]:
    """Tokens that transformers draws on the device, with the seed that the runtime gives each request."""
    model = AutoModelForCausalLM.from_pretrained(ref.directory, dtype=torch.float32).eval().cuda()
    return [sampled(model, prompt, index) for index, prompt in enumerate(ref.prompts[:NUM_SAMPLED])]


@cache
def _tokens(directory: str, prompts: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().cuda()
    return [_generate(model, list(prompt)) for prompt in prompts]


def _generate(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
