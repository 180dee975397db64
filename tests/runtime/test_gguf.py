"""A GGUF file gives the tokens that transformers gives when it reads the same file whole."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.run.identity import model_facts
from runtime import Runtime
from runtime.checkpoint_source import location as origin
from runtime.config.settings import DType, ModelConfig, Prefetch, PrefetchConfig, RuntimeConfig, Tier
from runtime.errors import CheckpointError, ConfigError
from runtime.model.families import FAMILIES, Family
from runtime.model.loading import load_model
from runtime.sequences.sequence import Completion, FinishReason
from runtime.synthesize.checkpoints import synthesize_checkpoint
from tests.dealt import with_slow_others
from tests.gguf_files import write_gguf
from tests.runtime.test_fidelity import config_for, tokens_of
from tests.support import NUM_NEW_TOKENS, Reference, greedy

pytest.importorskip("transformers.integrations.gguf", reason="transformers 5.18 or newer reads GGUF files as we do")

PROMPT_LENGTHS = (5, 17, 3, 30)
WIDE = {"hidden_size": 256, "intermediate_size": 512}  # K blocks are 256 columns wide
PLAIN = {"": Type.F32}
QWEN35 = Family(
    name="qwen3.5",
    model_type="qwen3_5_text",
    overrides={
        "vocab_size": 640, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 16,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, object], dict[str, Type]]] = {
    "llama F32": ("llama", {}, PLAIN),
    "llama F16": ("llama", {}, {"": Type.F16}),
    "llama BF16": ("llama", {}, {"": Type.BF16}),
    "llama Q8_0": ("llama", {}, {"": Type.Q8_0}),
    "llama Q5_0, Q5_1": ("llama", {}, {"attn": Type.Q5_0, "": Type.Q5_1}),
    "llama Q4_K_M": ("llama", WIDE, {"ffn_down": Type.Q6_K, "token_embd": Type.Q4_K, "": Type.Q4_K}),
    "llama Q2_K, Q3_K, Q5_K": ("llama", WIDE, {"attn": Type.Q3_K, "ffn": Type.Q5_K, "": Type.Q2_K}),
    "tied Q4_1": ("llama, tied", {}, {"": Type.Q4_1}),
    "experts Q4_0": (
        "qwen3-moe", {"moe_intermediate_size": 64}, {"ffn_gate_inp": Type.F32, "down": Type.Q8_0, "": Type.Q4_0},
    ),
    "gpt2 F16": ("gpt2", {"n_positions": 1024}, {"": Type.F16}),
    "gpt2 Q8_0": ("gpt2", {"n_positions": 1024}, {"": Type.Q8_0}),
    "gemma-2 Q8_0": ("gemma-2", {}, {"": Type.Q8_0}),
    "bloom Q8_0": ("bloom", {}, {"": Type.Q8_0}),
    "lfm-2 Q8_0": (
        "lfm-2",
        {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        {"conv.weight": Type.F32, "": Type.Q8_0},
    ),
    "qwen3.5 Q8_0": ("qwen3.5", {}, {"conv1d": Type.F32, "ssm_alpha": Type.F32, "ssm_beta": Type.F32, "": Type.Q8_0}),
}  # fmt: skip
QUICK = (
    "llama F16",
    "llama Q5_0, Q5_1",
    "llama Q4_K_M",
    "llama Q2_K, Q3_K, Q5_K",
    "experts Q4_0",
    "gpt2 Q8_0",
    "qwen3.5 Q8_0",
)


def make(name: str, directory: Path) -> Path:
    family, sizes, kinds = CASES[name]
    synthesize((FAMILIES | {"qwen3.5": QWEN35})[family], directory / "source", sizes)
    return write_gguf(directory / "source", directory / "model.gguf", kinds)


def synthesize(family: Family, directory: Path, sizes: dict[str, object]) -> None:
    overrides = {**family.overrides, **sizes}
    synthesize_checkpoint(model=family.model_type, overrides=overrides, directory=directory, seed=1)


def reference_for(path: Path) -> Reference:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 500, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    config = origin.read_config(path)  # transformers' own is wrong about the width of experts
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=torch.float32)
    expected = [greedy(model.eval(), prompt, NUM_NEW_TOKENS) for prompt in prompts]
    return Reference(directory=path, prompts=prompts, expected=expected, sampled=[])


def at(reference: Reference, cache: Path, tier: Tier = Tier.nvme) -> RuntimeConfig:
    config = config_for(reference, tier=tier, prefetch=PrefetchConfig(kind=Prefetch.lookahead))
    object.__setattr__(config.offload, "cache_dir", str(cache))
    return config


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("name", with_slow_others(CASES, QUICK))
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    ref = reference_for(make(name, tmp_path))
    runtime = Runtime(at(ref, tmp_path))
    assert tokens_of(runtime, ref.prompts) == ref.expected
    runtime.config = at(ref, tmp_path, Tier.none)
    assert tokens_of(runtime, ref.prompts) == ref.expected


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("name", ["llama Q8_0", "experts Q4_0", "gpt2 Q8_0"])
def test_nothing_is_converted_where_only_rows_and_names_differ(name: str, tmp_path: Path) -> None:
    loaded = load(make(name, tmp_path), tmp_path / "cache")
    assert not list(tmp_path.glob("cache/**/*.safetensors"))
    stored = {piece.file for stage in loaded.shape.stages for p in stage.parameters for piece in p.slices}
    assert stored == {str(tmp_path / "model.gguf")}


def test_only_the_norms_of_gemma_are_converted(tmp_path: Path) -> None:
    loaded = load(make("gemma-2 Q8_0", tmp_path), tmp_path / "cache")
    converted = {
        p.name
        for stage in loaded.shape.stages
        for p in stage.parameters
        for piece in p.slices
        if piece.file != str(tmp_path / "model.gguf")
    }
    assert converted
    assert all("norm" in name for name in converted)


def load(path: Path, cache: Path):
    config = ModelConfig(name="test", path=str(path), dtype=DType.float32)
    return load_model(config, torch.device("cpu"), str(cache))


def test_the_tokenizer_and_the_stop_ids_come_from_the_file(tmp_path: Path) -> None:
    path = make("llama Q8_0", tmp_path)
    loaded = load(path, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert loaded.tokenizer is not None
    text = "A mill, 2 stones!"
    assert loaded.tokenizer(text)["input_ids"] == theirs(text)["input_ids"]
    assert loaded.eos_token_ids == {2}
    results = Runtime(at(Reference(directory=path, prompts=[], expected=[], sampled=[]), tmp_path)).generate([text])
    assert "error" not in vars(results[0]) or results[0].error is None


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("key", ["eot_token_id", "eom_token_id"])
def test_the_end_of_a_turn_and_of_a_message_end_a_completion_too(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers, which knows neither, goes on; llama.cpp ends there as well."""
    ref = reference_for(make("llama Q8_0", tmp_path))
    end = ref.expected[0][2]
    write_gguf(tmp_path / "source", ref.directory, CASES["llama Q8_0"][2], {key: end})
    with caplog.at_level(logging.INFO):
        runtime = Runtime(at(ref, tmp_path))
    runtime.config = replace(runtime.config, sampling=replace(runtime.config.sampling, ignore_eos=False))
    found = runtime.generate(ref.prompts)
    assert runtime.model.eos_token_ids == {2, end}
    assert model_facts(runtime.model)["GGUF eos_token_id"] == sorted({2, end})
    assert f"tokenizer.ggml.{key}={end} also end a completion, in addition to eos_token_id=[2]" in caplog.text
    for result, whole in zip(found, ref.expected, strict=True):
        assert isinstance(result, Completion)
        ends = [place for place, token in enumerate(whole) if token in {2, end}]
        expected = whole[: ends[0] + 1] if ends else whole
        assert (list(result.token_ids), result.finish is FinishReason.eos) == (expected, bool(ends))
    runtime.config = replace(runtime.config, sampling=replace(runtime.config.sampling, ignore_eos=True))
    assert tokens_of(runtime, ref.prompts) == ref.expected


def test_an_end_outside_the_vocabulary_is_none(tmp_path: Path) -> None:
    path = make("llama Q8_0", tmp_path)
    write_gguf(tmp_path / "source", path, PLAIN, {"eot_token_id": 2**32 - 1, "eom_token_id": 2})
    assert load(path, tmp_path).eos_token_ids == {2}


def test_a_tensor_that_transformers_leaves_out_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make("llama F32", tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"blk.3.attn_norm.weight", b"blk.3.attn_xxxx.weight"))
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match=r"lacks 1 parameters.*layers.3.input"):
        load(path, tmp_path)
    assert "transformers does not use 1 tensors: blk.3.attn_xxxx.weight" in caplog.text


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    path = make("llama F32", tmp_path)
    path.write_bytes(path.read_bytes().replace(b"llama", b"lamma"))
    with pytest.raises(CheckpointError, match="lamma"):
        load(path, tmp_path)


@pytest.mark.parametrize(
    ("missing", "said"),
    [("gguf", r"pip install 'weightstream\[gguf\]'"), (origin.GGUF_READER, "transformers 5.18 or newer")],
)
def test_without_what_reads_it_a_file_is_refused_with_what_to_install(
    missing: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make("llama F32", tmp_path)
    monkeypatch.setattr(origin, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(ConfigError, match=said):
        load(path, tmp_path)


def test_a_directory_of_gguf_files_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(CheckpointError, match=r"model\.path=.*a\.gguf"):
        load(tmp_path, tmp_path)
