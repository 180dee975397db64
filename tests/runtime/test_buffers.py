"""What a checkpoint holds of buffers reaches the model, also where no stage brings it."""

from pathlib import Path

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedModel

from runtime import Runtime
from runtime.config.settings import DType, ModelConfig
from runtime.model.loading import LoadedModel, load_model
from tests.runtime.test_families import config_for, tokens
from tests.support import Reference, clear_answer

CONFIG = BartConfig(
    vocab_size=640,
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    max_position_embeddings=512,
    pad_token_id=0,
    decoder_start_token_id=2,
    forced_eos_token_id=None,
)


def saved(directory: Path) -> BartForConditionalGeneration:
    torch.manual_seed(0)
    model = BartForConditionalGeneration(CONFIG).eval()
    model.final_logits_bias.normal_()
    model.save_pretrained(directory)
    return model


def loaded(directory: Path) -> LoadedModel:
    return load_model(ModelConfig(name="test", path=str(directory), dtype=DType.float32), torch.device("cpu"), None)


def test_a_bias_that_the_root_of_a_model_keeps_is_read(tmp_path: Path) -> None:
    theirs = saved(tmp_path)
    ours: PreTrainedModel = loaded(tmp_path).staged.model
    assert torch.equal(ours.get_buffer("final_logits_bias"), theirs.final_logits_bias)


def test_tokens_of_a_model_with_such_a_bias_are_those_of_transformers(tmp_path: Path) -> None:
    theirs, generator = saved(tmp_path), torch.Generator().manual_seed(0)
    clear = [clear_answer(theirs, length, generator) for length in (5, 17, 3)]
    ref = Reference(directory=tmp_path, prompts=[p for p, _ in clear], expected=[t for _, t in clear], sampled=[])
    assert tokens(Runtime(config_for(ref)), ref.prompts) == ref.expected


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32])
def test_a_buffer_has_the_dtype_that_the_model_computes_with(tmp_path: Path, dtype: DType) -> None:
    saved(tmp_path)
    config = ModelConfig(name="test", path=str(tmp_path), dtype=dtype)
    model = load_model(config, torch.device("cpu"), None).staged.model
    assert model.get_buffer("final_logits_bias").dtype is getattr(torch, dtype.value)
