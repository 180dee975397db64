"""Settings of sampling on the command line, and `sampling=model` in the manifest of a run."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from jobs.config.cli import describe_hydra_error
from jobs.config.settings import GenerateConfig, load, settings_warnings
from jobs.config.typed import known_keys
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.record.run_dir import RunDirectory
from jobs.run.tasks.generate import generate
from runtime.config.sampling import FOLLOW_MODEL, PASSTHROUGH_KEYS
from runtime.config.settings import ModelConfig, SamplingConfig
from runtime.errors import ConfigError, RunMismatchError
from tests.generations import read_generations
from tests.support import Reference

CONF = Path(__file__).resolve().parents[2] / "conf"


def composed(*overrides: str) -> SamplingConfig:
    with initialize_config_dir(str(CONF), version_base=None):
        return load(GenerateConfig, compose("generate", overrides=list(overrides))).sampling


def test_the_option_leaves_all_that_a_model_can_say_to_it_and_the_command_line_wins() -> None:
    assert composed("sampling=model") == FOLLOW_MODEL
    one = composed("sampling=model", "sampling.temperature=0", "sampling.transformers={sequence_bias: [[[5,6],-2]]}")
    assert (one.temperature, one.sequence_bias, one.top_k) == (0.0, [[[5, 6], -2.0]], None)


@pytest.mark.dealt(most=5)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sequence_bias: [[5,-2]]", r"sampling\.sequence_bias must hold pairs like"),
        ("sequence_bias: [[[],-2]]", r"sampling\.sequence_bias must hold pairs like"),
        ("exponential_decay_length_penalty: [5]", r"sampling\.exponential_decay_length_penalty must be like"),
        ("exponential_decay_length_penalty: [5.5,1]", r"sampling\.exponential_decay_length_penalty must be"),
        ("bad_words_ids: [[]]", r"sampling\.bad_words_ids holds an empty list"),
        ("min_length: -1", r"sampling\.min_length must be 0 to 100,000,000, got -1"),
        ("top_h: 0", r"sampling\.top_h must be in \(0, 1\], got 0"),
        ("typical_p: 2", r"sampling\.typical_p must be in \(0, 1\], got 2"),
        ("eta_cutoff: 1", r"sampling\.eta_cutoff must be in \[0, 1\), got 1"),
        ("suppress_tokens: [a]", r"sampling\.suppress_tokens.* must be .*a whole number"),
        (
            "typcal_p: 0.5",
            r"unknown key sampling\.transformers\.typcal_p: did you mean sampling\.transformers\.typical_p\?",
        ),
        ("top_k: 5", r"unknown key sampling\.transformers\.top_k: did you mean sampling\.top_k\?"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed(f"sampling.transformers={{{override}}}")


@pytest.mark.parametrize("value", ["1", "typical_p", "[typical_p]"])
def test_what_is_passed_on_is_a_group_of_keys(value: str) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.transformers must be a group of keys or null, got "):
        composed(f"sampling.transformers={value}")


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("key", PASSTHROUGH_KEYS)
def test_what_is_passed_on_is_no_setting_of_its_own_and_the_refusal_says_how_it_is_written(key: str) -> None:
    assert getattr(composed(f"+sampling.transformers.{key}=null"), key) is None
    told = rf"unknown key sampling\.{key}: .* write 'sampling\.transformers=\{{{key}: <value>\}}'"
    with pytest.raises(ConfigError, match=told):
        composed(f"+sampling.{key}=1")
    with initialize_config_dir(str(CONF), version_base=None), pytest.raises(HydraException) as refused:
        compose("generate", overrides=[f"sampling.{key}=1"])
    assert re.match(told, describe_hydra_error(refused.value, known_keys(GenerateConfig)))


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("sampling.json_schema=invoice.json", {"json_schema": "invoice.json"}),
        ("sampling.json_schema={items: {type: integer}}", {"json_schema": {"items": {"type": "integer"}}}),
        ("sampling.choice=[red,light green]", {"choice": ["red", "light green"]}),
        ("sampling.regex='[a-z]{2}'", {"regex": "[a-z]{2}"}),
    ],
)  # fmt: skip
def test_what_a_completion_must_be_is_said_on_the_command_line(override: str, value: dict[str, object]) -> None:
    assert composed(override) == SamplingConfig(**value)  # pyright: ignore[reportArgumentType]


def test_a_run_is_bound_to_the_schema_that_its_file_had(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    config = GenerateConfig(
        model=ModelConfig(name="random"),
        dataset=DatasetConfig(kind=DatasetKind["prompt"], prompt="Say"),
        sampling=SamplingConfig(json_schema=str(schema), max_new_tokens=40),
        output_root=str(tmp_path),
    )
    schema.write_text(json.dumps({"enum": ["a", "b"]}))
    first = generate(config, lambda: False)
    schema.write_text(json.dumps({"enum": ["a", "b"]}, indent=4))
    assert generate(config, lambda: False).was_finished
    schema.write_text(json.dumps({"enum": ["a", "c"]}))
    with pytest.raises(RunMismatchError, match=r"sampling\.json_schema"):
        generate(config, lambda: False)
    completion = read_generations(RunDirectory(path=first.directory))["completion"].to_pylist()[0]
    assert json.loads(completion) in ("a", "b")


def test_a_run_is_bound_to_the_settings_that_the_model_gave(
    reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(reference("llama").directory, model)

    def start(**said: object) -> int:
        (model / "generation_config.json").write_text(json.dumps(said))
        config = GenerateConfig(
            model=ModelConfig(name="hf", path=str(model)),
            dataset=DatasetConfig(limit=2),
            sampling=FOLLOW_MODEL,
            run="case",
            output_root=str(tmp_path),
        )
        return generate(config, lambda: False).exit_code

    assert start(repetition_penalty=1.25) == 0
    stored = json.loads((tmp_path / "generate" / "case" / "run.json").read_text())["semantic"]
    assert (stored["sampling.repetition_penalty"], stored["sampling.temperature"]) == (1.25, 0.0)
    with pytest.raises(RunMismatchError, match=r"sampling\.repetition_penalty: 1\.25 -> 1\.5"):
        start(repetition_penalty=1.5)


@pytest.mark.parametrize("option", ["greedy", "sample"])
def test_the_documented_stop_string_is_a_newline_when_bash_hands_it_on(option: str) -> None:
    text = (CONF / "sampling" / f"{option}.yaml").read_text()
    (documented,) = re.findall(r"in bash: (\$'[^']*')", text)
    shell = subprocess.run(["bash", "-c", f"printf %s {documented}"], capture_output=True, text=True, check=True)
    with initialize_config_dir(str(CONF), version_base=None):
        config = load(GenerateConfig, compose("generate", overrides=[f"sampling={option}", shell.stdout]))
    assert config.sampling.stop == ["\n"]
    assert settings_warnings(config) == []


def test_a_stop_string_of_a_backslash_and_a_letter_is_named_with_what_to_write() -> None:
    config = GenerateConfig(sampling=SamplingConfig(stop=["\\n", "a\\tb", "c\n", "\\x"]))
    newline, tab = settings_warnings(config)
    assert "$'sampling.stop=[\"\\n\"]'" in newline
    assert "$'sampling.stop=[\"a\\tb\"]'" in tab
