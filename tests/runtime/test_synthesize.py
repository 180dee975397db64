"""Synthesised checkpoints load in transformers, decode to varied tokens, and never take the memory of the model."""

import errno
import fcntl
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, PreTrainedModel

from runtime.errors import CheckpointError, ConfigError, OutputError
from runtime.model.families import FAMILIES, Family
from runtime.probing.meta import build_meta_model
from runtime.synthesize.checkpoints import (
    MARKER_FILE,
    SynthesisReport,
    make_config,
    random_checkpoint,
    synthesize_checkpoint,
)
from runtime.synthesize.random_weights import RandomWeights
from tests.processes import alone, at_once
from tests.support import greedy

VARIED = (
    "llama",
    "llama, tied",
    "mixtral",
    "qwen3-moe",
    "gpt2",
    "opt",
    "gpt-neox",
    "falcon, first",
    "bloom",
    "qwen3-next",
)
LLAMA_SIZES = FAMILIES["llama"].overrides
PROMPTS = ("Tell me a story about mills.", "What is 2+2?", "Write a poem.")


def synthesize(family: Family, directory: Path, *, max_shard_bytes: int = 150_000, seed: int = 2) -> SynthesisReport:
    return synthesize_checkpoint(
        model=family.model_type,
        overrides=family.overrides,
        directory=directory,
        seed=seed,
        max_shard_bytes=max_shard_bytes,
    )


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def distinct_tokens(model: PreTrainedModel, directory: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [greedy(model, tokenizer.encode(prompt), 24) for prompt in PROMPTS]


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("name", VARIED)
def test_checkpoint_loads_without_a_missing_key_and_decodes_to_varied_tokens(name: str, tmp_path: Path) -> None:
    report = synthesize(FAMILIES[name], tmp_path)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), loading
    assert report.num_shards == len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert report.num_parameters == sum(tensor.numel() for tensor in weights_in(tmp_path).values())
    outputs = distinct_tokens(model, tmp_path)
    assert min(len(set(tokens)) for tokens in outputs) >= 8, outputs
    assert len({tuple(tokens) for tokens in outputs}) == len(PROMPTS)


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("name", VARIED)
def test_layout_is_that_of_save_pretrained(name: str, tmp_path: Path) -> None:
    synthesize(FAMILIES[name], tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=150_000)
    ours, theirs = weights_in(tmp_path / "ours"), weights_in(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    ours_config, theirs_config = (
        json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs")
    )
    assert ours_config == theirs_config


def test_mixtral_has_a_tensor_for_each_expert(tmp_path: Path) -> None:
    synthesize(FAMILIES["mixtral"], tmp_path)
    assert weights_in(tmp_path)["model.layers.3.block_sparse_moe.experts.2.w1.weight"].shape == (128, 64)


def test_values_depend_on_the_seed_and_the_name_only(tmp_path: Path) -> None:
    family = FAMILIES["mixtral"]
    fewer_layers = replace(family, overrides={**family.overrides, "num_hidden_layers": 2})
    synthesize(family, tmp_path / "many", max_shard_bytes=50_000)
    synthesize(family, tmp_path / "one", max_shard_bytes=1 << 30)
    synthesize(fewer_layers, tmp_path / "fewer")
    synthesize(family, tmp_path / "other", seed=3)
    many, one, fewer, other = (weights_in(tmp_path / name) for name in ("many", "one", "fewer", "other"))
    assert many.keys() == one.keys()
    assert all(torch.equal(many[key], one[key]) for key in many)
    assert all(torch.equal(many[key], fewer[key]) for key in fewer)
    assert not any(torch.equal(many[key], other[key]) for key in many)


@pytest.mark.parametrize(
    ("name", "pattern", "std"),
    [
        ("llama", "q_proj.weight", 2 / 64**0.5),
        ("llama", "down_proj.weight", 2 / 128**0.5),
        ("llama", "embed_tokens.weight", 0.02),
        ("llama", "lm_head.weight", 2 / 64**0.5),
        ("llama, tied", "embed_tokens.weight", 1.5 / 64**0.5),
        ("mixtral", "experts.1.w2.weight", 2 / 128**0.5),
        ("gpt2", "mlp.c_proj.weight", 2 / 256**0.5),  # Conv1D: stored (in, out)
        ("gpt2", "mlp.c_fc.bias", 0.02),
        ("qwen3-next", "conv1d.weight", 2 / 4**0.5),
    ],
)
def test_matrices_are_scaled_by_their_fan_in(name: str, pattern: str, std: float) -> None:
    family = FAMILIES[name]
    weights = RandomWeights(build_meta_model(make_config(family.model_type, family.overrides), torch.float32), seed=0)
    drawn = torch.cat([weights.draw(spec).flatten() for spec in weights.specs if spec.name.endswith(pattern)])
    assert drawn.std().item() == pytest.approx(std, rel=0.1)
    assert abs(drawn.mean().item()) < 5 * std / drawn.numel() ** 0.5


def test_norms_scale_by_plus_or_minus_one_whichever_way_the_class_writes_it() -> None:
    family = FAMILIES["qwen3-next"]
    weights = RandomWeights(build_meta_model(make_config(family.model_type, family.overrides), torch.float32), seed=0)
    drawn = {spec.name: weights.draw(spec) for spec in weights.specs}
    assert drawn["model.norm.weight"].unique().tolist() == [-2.0, 0.0]  # computes 1 + weight
    assert drawn["model.layers.3.self_attn.q_norm.weight"].unique().tolist() == [-3.0, 1.0]  # queries twice as loud
    assert drawn["model.layers.0.linear_attn.norm.weight"].unique().tolist() == [-1.0, 1.0]


def test_recurrent_parameters_have_the_values_of_their_own_class() -> None:
    family = FAMILIES["qwen3-next"]
    weights = RandomWeights(build_meta_model(make_config(family.model_type, family.overrides), torch.float32), seed=0)
    drawn = {spec.name: weights.draw(spec) for spec in weights.specs}
    assert (drawn["model.layers.0.linear_attn.dt_bias"] == 1).all()
    decay = drawn["model.layers.0.linear_attn.A_log"].exp()
    assert (decay > 0).all()
    assert (decay <= 16).all()
    assert not torch.equal(drawn["model.layers.1.linear_attn.A_log"].exp(), decay)


def test_token_ids_are_the_tokenizers_unless_overridden(tmp_path: Path) -> None:
    synthesize(FAMILIES["gpt2"], tmp_path / "a")
    overridden = replace(FAMILIES["gpt2"], overrides={**FAMILIES["gpt2"].overrides, "eos_token_id": 7})
    synthesize(overridden, tmp_path / "b")
    for directory, eos in ((tmp_path / "a", 2), (tmp_path / "b", 7)):
        for file in ("config.json", "generation_config.json"):
            ids = json.loads((directory / file).read_text())
            assert (ids["bos_token_id"], ids["eos_token_id"], ids["pad_token_id"]) == (1, eos, 0), file


def test_token_ids_outside_a_smaller_vocabulary_become_the_tokenizers_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    published = {**FAMILIES["llama"].overrides, "bos_token_id": 128000, "eos_token_id": 128001}
    synthesize(replace(FAMILIES["llama"], overrides=published), tmp_path / "a")
    ids = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (ids["bos_token_id"], ids["eos_token_id"]) == (1, 2)
    assert [record.message for record in caplog.records if "vocabulary" in record.message] == []


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def note(done_bytes: int, total_bytes: int) -> None:
        seen.append((done_bytes, total_bytes))

    report = synthesize_checkpoint(model="llama", overrides=LLAMA_SIZES, directory=tmp_path, progress=note)
    total_bytes = 2 * report.num_parameters
    assert seen[0] == (0, total_bytes)
    assert seen[-1] == (total_bytes, total_bytes)
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("model_type", "overrides", "message"),
    [
        ("lama", {}, "unknown model type 'lama'; did you mean .*llama"),
        ("llama", {"hiden_size": 64}, "a llama config has no key 'hiden_size'; did you mean hidden_size"),
        ("llama", {"hidden_size": "wide"}, "invalid llama config"),
        ("llama", {"vocab_size": 100}, "needs 259 ids"),
        ("gpt2", {"n_embd": 65, "n_head": 4}, "cannot build a gpt2 model"),
        ("deepseek_v3", {"num_attention_heads": 4}, "num_attention_heads=4 is no multiple of num_key_value_heads=128"),
    ],
)
def test_an_impossible_model_is_refused(
    model_type: str, overrides: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        synthesize_checkpoint(model=model_type, overrides=overrides, directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_file", [True, False])
def test_what_is_already_there_is_not_touched(is_file: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    precious = out if is_file else out / "precious"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("mine")
    with pytest.raises(ConfigError, match=r"out=.*(is not empty|is a file)"):
        synthesize_checkpoint(model="llama", overrides=LLAMA_SIZES, directory=out)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [precious]
    assert precious.read_text() == "mine"


def test_where_a_writer_found_no_room_or_was_killed_the_same_call_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str) -> dict[str, bytes]:
        out = tmp_path / name
        synthesize_checkpoint(model="llama", overrides=LLAMA_SIZES, directory=out, max_shard_bytes=50_000)
        return {path.name: path.read_bytes() for path in out.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match="No space left"):
            make("out")
    (tmp_path / "out" / ".model-00007-of-00009.safetensors.tmp").write_bytes(b"of one that was killed")
    (tmp_path / "out" / "model-00008-of-00009.safetensors").write_bytes(b"of one with smaller shards")
    assert make("out") == make("whole")


def test_two_writers_never_share_a_directory(tmp_path: Path) -> None:
    (tmp_path / ".unfinished").touch()
    with (tmp_path / ".unfinished").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process writes"):
            synthesize_checkpoint(model="llama", overrides=LLAMA_SIZES, directory=tmp_path)


def test_random_checkpoint_is_written_once_and_generates(tmp_path: Path) -> None:
    directory = random_checkpoint(tmp_path / "cache")
    written = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert random_checkpoint(tmp_path / "cache") == directory
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == written
    assert random_checkpoint(tmp_path / "cache", seed=1) != directory
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert min(len(set(tokens)) for tokens in distinct_tokens(model, directory)) >= 12


def test_concurrent_callers_get_one_random_checkpoint(tmp_path: Path) -> None:
    (directory,) = set(at_once(2, random_checkpoint, tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == [directory]


@pytest.mark.parametrize("damage", ["truncate", MARKER_FILE, "config.json"])
def test_a_damaged_random_checkpoint_is_reported_not_replaced(damage: str, tmp_path: Path) -> None:
    directory = random_checkpoint(tmp_path)
    if damage == "truncate":
        (directory / "model.safetensors").write_bytes(b"")
    else:
        (directory / damage).unlink()
    left = sorted(directory.iterdir())
    with pytest.raises(CheckpointError, match="move it away"):
        random_checkpoint(tmp_path)
    assert sorted(directory.iterdir()) == left


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def write_mixtral(directory: Path, **sizes: int) -> SynthesisReport:
    config = MixtralConfig(vocab_size=4096, num_attention_heads=8, num_key_value_heads=2, **sizes)
    return synthesize_checkpoint(model=config, directory=directory, max_shard_bytes=40_000_000)


def peak_growth(directory: Path) -> tuple[int, int]:
    """By how many bytes a checkpoint moves this process's peak, and how many are written."""
    write_mixtral(directory / "warm", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    before = peak_bytes()
    report = write_mixtral(directory / "big", hidden_size=512, intermediate_size=1024, num_hidden_layers=6)
    return peak_bytes() - before, report.num_bytes


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
def test_memory_is_that_of_a_tensor_not_of_the_model(tmp_path: Path) -> None:
    growth_bytes, num_bytes = alone(peak_growth, tmp_path)
    largest_bytes = 4096 * 512 * 2
    assert num_bytes > 150e6
    assert growth_bytes < 6 * largest_bytes + 20e6


def test_a_config_object_is_used_as_it_is_and_left_unchanged(tmp_path: Path) -> None:
    config = MixtralConfig(**(dict(FAMILIES["mixtral"].overrides)))
    before = config.to_dict()
    synthesize_checkpoint(model=config, directory=tmp_path)
    assert config.to_dict() == before
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["architectures"], written["dtype"]) == (["MixtralForCausalLM"], "bfloat16")
    assert written["num_local_experts"] == 4
