"""config.json and generation_config.json are text from a stranger: nothing in them loads code, and what is odd in them
is an error by name, in seconds."""

import json
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoConfig

from runtime.cache_root import cache_root
from runtime.checkpoint_source.location import read_config
from runtime.config.settings import ModelConfig
from runtime.errors import CheckpointError, WeightstreamError
from runtime.model import attention
from runtime.model.loading import LoadedModel, load_model
from runtime.synthesize.checkpoints import random_checkpoint

MARKER = "it ran"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_checkpoint(cache_root(None) / "tiny"), tmp_path / "model"))


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def loaded(directory: Path) -> LoadedModel:
    return load_model(ModelConfig(name="hf", path=str(directory)), torch.device("cpu"), None)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What transformers asks its loader of native code for, were that installed."""
    asked: list[str] = []

    def load(name: str, *more: object, **and_more: object) -> None:
        asked.append(name)
        raise ImportError(name)

    monkeypatch.setattr("transformers.integrations.hub_kernels.load_and_register_attn_kernel", load)
    monkeypatch.setattr(
        "transformers.modeling_flash_attention_utils.load_and_register_attn_kernel", load, raising=False
    )
    return asked


KERNEL = "kernels-community/evil"


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_attn_implementation_internal"])
@pytest.mark.parametrize("value", [KERNEL, "flash_attention_2", {"": KERNEL}])
def test_a_config_names_no_attention_kernel(key: str, value: object, model: Path, kernels: list[str]) -> None:
    change(model / "config.json", **{key: value, "experts_implementation": "evil", "use_kernels": True})
    assert loaded(model).staged.model.config._attn_implementation == attention.NAME
    assert not kernels


def test_the_config_of_a_part_names_none_either(tmp_path: Path, kernels: list[str]) -> None:
    text = {"model_type": "gemma3_text", "_attn_implementation": KERNEL, "auto_map": {"AutoConfig": "evil.Evil"}}
    whole = {"model_type": "gemma3", "attn_implementation": {"text_config": KERNEL}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = read_config(tmp_path)
    assert (config._attn_implementation, config.get_text_config()._attn_implementation) == (None, None)
    assert not hasattr(config.get_text_config(), "auto_map")
    assert AutoConfig.from_pretrained(tmp_path).get_text_config()._attn_implementation == KERNEL, "a test that can fail"
    assert not kernels


@pytest.fixture
def evil(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with code beside its weights; whoever asks at the terminal is told yes."""
    (model / "evil.py").write_text(f"import sys\nsys.modules[{MARKER!r}] = sys\n")
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    return model


def test_code_in_the_directory_runs_by_no_key(evil: Path) -> None:
    named = {"AutoConfig": "evil.E", "AutoModelForCausalLM": "evil.E", "AutoTokenizer": ["evil.E", "evil.E"]}
    change(evil / "config.json", auto_map=named, trust_remote_code=True)
    for tokenizer_class in ("Unknown", "LlamaTokenizer"):
        change(evil / "tokenizer_config.json", auto_map=named, tokenizer_class=tokenizer_class, trust_remote_code=True)
        tokenizer = loaded(evil).tokenizer
        assert tokenizer is not None
        assert tokenizer.name_or_path == str(evil)
    change(evil / "config.json", model_type="evil")
    with pytest.raises(CheckpointError, match="no model type 'evil'"):
        loaded(evil)
    assert MARKER not in sys.modules


def test_a_kernel_package_is_not_even_imported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("kernels")
    package.__getattr__ = lambda name: pytest.fail(f"kernels.{name}")  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "kernels", package)
    change(model / "config.json", _attn_implementation=KERNEL)
    loaded(model)


BAD_VALUES: dict[str, list[object]] = {
    "num_hidden_layers": ["4", 4.0, -1, 0, 100_000, 10**9, None, [4], True],
    "hidden_size": [None, 0, 10**12, 10**30, "x"],
    "vocab_size": [10**10, -1, 100],
    "num_attention_heads": [0, 3, "8"],
    "num_key_value_heads": [0, -2, 3],
    "head_dim": [-32, 7, 1.5],
    "intermediate_size": [255, -1],
    "max_position_embeddings": [-5, 0, "x"],
    "rms_norm_eps": ["x", float("nan"), float("inf"), -1],
    "hidden_act": ["__import__", 5],
    "model_type": ["nosuch", ["llama"], "../../x", None, 7],
    "rope_parameters": ["x", {"rope_type": "nosuch"}, {"rope_type": "yarn", "factor": -1, "rope_theta": 1e4}, [1]],
    "quantization_config": ["x", [1], {"quant_method": "evil"}, {"quant_method": "fp8", "weight_block_size": [0, 0]}],
    "eos_token_id": ["abc", [2, "x"], 1.5],
    "pad_token_id": [10**9],
    "dtype": ["os.system", "nn", 5],
    "tie_word_embeddings": ["yes"],
    "is_encoder_decoder": [True, "x"],
    "layer_types": [["x"], 5],
    "per_layer_config": [{"0": {"hidden_size": 3}}, "x"],
    "text_config": ["x"],
}


@pytest.mark.dealt(most=8)
@pytest.mark.parametrize("key", BAD_VALUES)
def test_an_odd_value_is_refused_by_name_within_seconds(key: str, model: Path) -> None:
    good = (model / "config.json").read_text()
    for value in BAD_VALUES[key]:
        (model / "config.json").write_text(good)
        change(model / "config.json", **{key: value})
        started = time.monotonic()
        with pytest.raises(WeightstreamError) as error:
            loaded(model)
        text = str(error.value)
        assert time.monotonic() - started < 10
        assert error.value.exit_code == 2
        assert str(model) in text or "model.path" in text or "checkpoint" in text
        assert len(text) < 500, "no list of everything that transformers knows"


NAMED = {
    "num_hidden_layers": (100_000, r"config\.json: num_hidden_layers must be 256 at most: the weights hold 39 tensors"),
    "hidden_size": ("x", r"config\.json: hidden_size must be a whole number from 1 .*, got 'x'"),
    "rms_norm_eps": ("x", r"config\.json: rms_norm_eps must be a finite number, 0 or more, got 'x'"),
    "sliding_window": (1, r"config\.json: sliding_window must be more than 1 token: .*keep every token, got 1"),
    "hidden_act": ("nosuch", r"hidden_act='nosuch' is unknown to transformers"),
    "rope_parameters": ({"rope_type": "nosuch"}, r"rope_parameters\.rope_type='nosuch' is unknown"),
    "model_type": ("lama", r"config\.json: transformers .* has no model type 'lama'; did you mean 'llama'"),
}


@pytest.mark.parametrize("key", NAMED)
def test_the_message_names_file_key_value_and_what_is_expected(key: str, model: Path) -> None:
    value, message = NAMED[key]
    change(model / "config.json", **{key: value})
    with pytest.raises(CheckpointError, match=message):
        loaded(model)


NO_OBJECTS = [b"", b"{", b"[]", b"NaN", b"null", b"5", b'"x"', b"[" * 100_000, b'{"a":' * 1000, b"\xff\xfe\0"]
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("file", [*FILES, "added_tokens.json"])
def test_a_file_that_holds_no_object_is_refused_by_its_name(file: str, model: Path) -> None:
    for content in NO_OBJECTS:
        (model / file).write_bytes(content)
        with pytest.raises(CheckpointError) as error:
            loaded(model)
        assert str(model / file) in str(error.value)


@pytest.mark.parametrize("file", [*FILES, "model.safetensors"])
def test_what_may_never_end_is_not_read(file: str, model: Path) -> None:
    (model / file).unlink(missing_ok=True)
    (model / file).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file") as error:
        loaded(model)
    assert file in str(error.value)


def test_infinity_stays_what_transformers_writes(tmp_path: Path) -> None:
    limits = {"model_type": "mamba2", "time_step_limit": [0.0, float("inf")]}
    (tmp_path / "config.json").write_text(json.dumps(limits))
    assert list(read_config(tmp_path).time_step_limit) == [0.0, float("inf")]
