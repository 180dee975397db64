"""Before a run of a class that nobody has proven, its lanes are held against its own `generate`."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from runtime import ModelConfig, OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import DType, PolicyKind, SelfCheck
from runtime.engine import self_check
from runtime.engine.self_check import LONG_RUN_SECONDS, TeacherForcing, check_lanes, is_check_due
from runtime.errors import ConfigError
from runtime.model import capabilities as traits
from runtime.model import loading
from runtime.model.families import FAMILIES, Family
from runtime.model.truncated_model import num_representative_layers
from runtime.probing import guards
from runtime.probing.meta import auto_class
from runtime.probing.padded_probe import PaddingBehavior
from runtime.sequences import reading
from runtime.stream.device import ComputeDevice
from runtime.synthesize.checkpoints import make_config
from tests.dealt import with_slow_others
from tests.fake_device import FakeDevice
from tests.gguf_files import write_gguf
from tests.quantized import write_fp8
from tests.runtime.guard_support import NOT_PACKED
from tests.runtime.long_rope import LONG_ROPE
from tests.support import Reference, made_once, synthesize
from tests.tiny_checkpoints import save_tiny
from tests.tiny_configs import tiny_config

References = Callable[[str], Reference]
LONG_WINDOW, LONG_LIMIT = 100, 100  # that no token of a check reaches, but for what an excerpt makes of them
STATE = {"vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 3}
MAMBA = {**STATE, "state_size": 8, "time_step_rank": 4}
RWKV = {**STATE, "attention_hidden_size": 64, "context_length": 512, "intermediate_size": 128}
GRIFFIN = {
    **STATE, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1, "lru_width": 64,
    "attention_window_size": 9,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": 640, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip


def _wide(name: str) -> Family:
    """With a window that is longer than what a check tells."""
    family = NOT_PACKED[name][0]
    overrides = dict(family.overrides)
    return replace(family, overrides=overrides | {k: LONG_WINDOW for k in overrides if k == "sliding_window"})


def _long(name: str) -> Family:
    rope = {**LONG_ROPE, "original_max_position_embeddings": LONG_LIMIT}
    overrides = {**FAMILIES[name].overrides, "rope_parameters": rope}
    if name == "phi-3":
        overrides["original_max_position_embeddings"] = LONG_LIMIT
    return Family(name=f"{name}, long", model_type=FAMILIES[name].model_type, overrides=overrides)


WRONG: dict[str, Family] = {
    **{name: _wide(name) for name in NOT_PACKED},
    **{f"{name}, long": _long(name) for name in ("llama", "phi-3")},
    **{
        family.name: family
        for family in (
            Family(name="mamba", model_type="mamba", overrides=MAMBA | {"use_mambapy": False}),
            Family(name="falcon-mamba", model_type="falcon_mamba", overrides=MAMBA),
            Family(name="rwkv", model_type="rwkv", overrides=RWKV),
            Family(name="recurrent-gemma", model_type="recurrent_gemma", overrides=GRIFFIN),
            Family(name="bart", model_type="bart", overrides=SEQ2SEQ),
        )
    },
}


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing looks at what a class does, and nothing is done about it."""
    monkeypatch.setattr(traits, "packed_lanes_obstacle", lambda model: "")
    for guard in ("unsupported_argument", "custom_mask", "looks_ahead", "changed_kv", "hidden_window"):
        monkeypatch.setattr(guards, guard, lambda *args, **kwargs: "")
    monkeypatch.setattr(loading, "follow_lengths", lambda model: None)
    monkeypatch.setattr(loading, "fill_buffers", lambda *args: None)
    monkeypatch.setattr(loading, "probe_padding", lambda model: PaddingBehavior())


@pytest.fixture
def saved(shared_home: Path) -> Callable[[Family], Path]:
    """`saved(family)`: random weights, and buffers that are not what the class makes of them; made once."""
    return lambda family: (
        made_once(shared_home / "self-check" / family.name, lambda home: _save(family, home / "model")) / "model"
    )


def _save(family: Family, directory: Path) -> None:
    config = make_config(family.model_type, family.overrides)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim >= 2 and min(tensor.shape) > 1:
                tensor.copy_(noise * 1.5 * tensor.shape[-1] ** -0.5)
            elif tensor.is_floating_point():
                tensor.add_(0.3 * noise)
    model.save_pretrained(directory)


def opened(path: Path, dtype: DType = DType.float32, device: ComputeDevice | None = None) -> Runtime:
    return Runtime(
        RuntimeConfig(
            model=ModelConfig(name="test", path=str(path), dtype=dtype),
            policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=2),
            sampling=SamplingConfig(max_new_tokens=2),
        ),
        device=device,
    )


def check(runtime: Runtime, mode: SelfCheck = SelfCheck.auto) -> None:
    config = replace(runtime.config, model=replace(runtime.config.model, self_check=mode))
    check_lanes(runtime.model, config, runtime.budgets(), runtime.reader, lambda: False)


def passes(runtime: Runtime, caplog: pytest.LogCaptureFixture, mode: SelfCheck = SelfCheck.auto) -> str:
    """What is said of a check that finds nothing wrong."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger=self_check.__name__):
        check(runtime, mode)
    (said,) = [record for record in caplog.records if record.name == self_check.__name__]
    assert said.levelno == logging.DEBUG, said.getMessage()
    return said.getMessage()


@pytest.mark.dealt(most=2)
@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("name", with_slow_others(WRONG, ["llama, long", "mamba", "rwkv", "bart"]))
def test_what_no_guard_knows_of_is_refused_before_the_run(name: str, saved: Callable[[Family], Path]) -> None:
    runtime = opened(saved(WRONG[name]))
    with pytest.raises(ConfigError, match=r"model\.self_check: .*model\.self_check=off"):
        check(runtime)


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("family", ["llama", "gemma-3", "deepseek-v3", "qwen3-next", "bloom", "t5"])
def test_proven_families_give_no_false_alarm(
    family: str, reference: References, caplog: pytest.LogCaptureFixture
) -> None:
    assert "match transformers within" in passes(opened(reference(family).directory), caplog)


@pytest.fixture
def youtu(shared_home: Path) -> Path:
    """A class that sets a row of its tied embeddings to zero as it is loaded, of which the checkpoint has others."""
    config = tiny_config("youtu")
    return (
        made_once(
            shared_home / "self-check" / "youtu",
            lambda home: save_tiny(auto_class(config).from_config(config, dtype=torch.float32), home / "model"),
        )
        / "model"
    )


def test_weights_that_a_class_overwrites_as_it_is_loaded_are_seen(youtu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(opened(youtu))
    monkeypatch.setattr(loading, "zeroed_rows", lambda model: {})
    with pytest.raises(
        ConfigError,
        match=r"the logits of YoutuForCausalLM in .* differ from those of its own generate",
    ):
        check(opened(youtu))


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", ["llama", "bloom", "t5"])
def test_a_run_of_scores_has_its_log_probabilities_compared(
    family: str, reference: References, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = opened(reference(family).directory)
    asked = replace(runtime.config, model=replace(runtime.config.model, self_check=SelfCheck.full))
    with caplog.at_level(logging.DEBUG, logger=self_check.__name__):
        check_lanes(runtime.model, asked, runtime.budgets(), runtime.reader, lambda: False, scores=True)
    assert "logits and log-probabilities" in caplog.text
    written = reading.TokenScorer._pack_scores

    def off(self: reading.TokenScorer, logits_NV: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        return written(self, logits_NV.cumsum(0), *args)  # right for the first of each slice alone

    monkeypatch.setattr(reading.TokenScorer, "_pack_scores", off)
    check(runtime, SelfCheck.full)  # generates: nothing of it is wrong
    with pytest.raises(ConfigError, match=r"log-probabilities of .*Its greedy tokens are right"):
        check_lanes(runtime.model, asked, runtime.budgets(), runtime.reader, lambda: False, scores=True)


@pytest.mark.parametrize("name", ["llama, long", "phi-3, long"])
def test_guarded_classes_pass(name: str, saved: Callable[[Family], Path], caplog: pytest.LogCaptureFixture) -> None:
    passes(opened(saved(WRONG[name])), caplog)


def test_neither_precision_nor_place_of_the_run_matters(
    reference: References, caplog: pytest.LogCaptureFixture
) -> None:
    """It is made in float32 on the CPU."""
    path = reference("mixtral").directory
    for dtype, device in ((DType.bfloat16, None), (DType.float16, FakeDevice())):
        passes(opened(path, dtype, device), caplog)


def test_quantised_weights_are_widened_for_both(
    reference: References, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, _ = write_fp8(reference("deepseek-v3").directory, tmp_path / "fp8", (32, 32))
    source = synthesize("llama", tmp_path / "source")
    for path in (quantised, write_gguf(source, tmp_path / "model.gguf", {"": GGMLQuantizationType.Q8_0})):
        passes(opened(path), caplog)


def test_full_takes_all_layers(reference: References, caplog: pytest.LogCaptureFixture) -> None:
    runtime = opened(reference("llama").directory)
    assert "in 2 of 4 layers" in passes(runtime, caplog)
    assert "in 4 of 4 layers" in passes(runtime, caplog, SelfCheck.full)


def test_every_kind_of_layer_is_in_an_excerpt(reference: References) -> None:
    kinds = {"llama": 2, "qwen3-next": 4, "gemma-3": 2, "deepseek-v3": 2}
    for family, most in kinds.items():
        model = opened(reference(family).directory).model
        assert num_representative_layers(model.shape, model.staged.model.config) == most, family


def test_what_does_not_fit_is_not_checked_and_a_warning_says_so(
    reference: References, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = opened(reference("llama").directory)
    config = replace(runtime.config, offload=OffloadConfig(host_memory_gib=0.0005))
    runtime.config = config
    check(runtime)
    (said,) = [r.getMessage() for r in caplog.records if r.name == self_check.__name__ and r.levelno == logging.WARNING]
    assert "LlamaForCausalLM is not checked" in said
    assert "offload.host_memory_gib allows" in said


def test_auto_checks_what_is_not_proven_and_long_runs_of_small_models(
    reference: References, saved: Callable[[Family], Path]
) -> None:
    proven = opened(reference("llama").directory).model
    unproven = opened(saved(WRONG["bart"])).model
    due: Mapping[tuple[SelfCheck, float], tuple[bool, bool]] = {
        (SelfCheck.auto, 0.0): (False, True),
        (SelfCheck.auto, LONG_RUN_SECONDS): (True, True),
        (SelfCheck.full, 0.0): (True, True),
        (SelfCheck.off, LONG_RUN_SECONDS): (False, False),
    }
    for (mode, seconds), expected in due.items():
        assert (is_check_due(proven, mode, seconds), is_check_due(unproven, mode, seconds)) == expected, (mode, seconds)


def test_a_run_begins_with_the_check_once(saved: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[TeacherForcing] = []
    real = self_check.run_generate
    monkeypatch.setattr(self_check, "run_generate", lambda *args: told.append(args[2]) or real(*args))
    runtime = opened(saved(WRONG["diffllama"]))
    for _ in range(2):
        runtime.generate([[5, 6, 7]])
    assert len(told) == 1
    for _ in range(2):
        runtime.score([([5, 6, 7], [8, 9])])
    assert len(told) == 2, "scores are compared at the first that are asked for"
