"""What a composed config becomes: typed, strict, one line for each failure; and which keys can change the text."""

import json
import re

import pytest
from omegaconf import OmegaConf

from jobs.config.settings import (
    GenerateConfig,
    LogLevel,
    SynthesizeConfig,
    load,
    operational,
    run_name,
    semantic,
    settings_warnings,
)
from jobs.config.typed import build, known_keys, to_settings
from jobs.datasets.config import DatasetKind
from runtime.config.sampling import PASSTHROUGH_KEYS
from runtime.config.settings import DType, Prefetch, Tier
from runtime.errors import ConfigError


def generate(*overrides: str) -> GenerateConfig:
    """A config as Hydra would hand it over, with dotted overrides; absent keys take the dataclass's defaults."""
    return load(GenerateConfig, OmegaConf.from_dotlist(list(overrides)))


def synthesize(*overrides: str) -> SynthesizeConfig:
    return load(SynthesizeConfig, OmegaConf.from_dotlist(["out=x", "architecture.model_type=llama", *overrides]))


def test_values_arrive_with_their_types() -> None:
    config = generate(
        "offload.tier=nvme",
        "offload.host_memory_gib=2",
        "prefetch={kind: 'off'}",
        "sampling.stop=['a,b', '\\n']",
        "dataset={kind: jsonl, path: rows.jsonl}",
        "run=7",
        "log_level=debug",
    )
    assert config.offload.tier is Tier.nvme
    assert isinstance(config.offload.host_memory_gib, float)
    assert config.prefetch.kind is Prefetch.off
    assert config.sampling.stop == ["a,b", "\\n"]
    assert config.dataset.kind is DatasetKind.jsonl
    assert config.run == "7"
    assert config.log_level is LogLevel.debug


def test_interpolations_are_resolved() -> None:
    assert generate("run=${sampling.seed}", "sampling.seed=3").run == "3"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.max_new_tokns=3"], "unknown key sampling.max_new_tokns: did you mean sampling.max_new_tokens?"),
        (["sampling.max_token=3"], "unknown key sampling.max_token: did you mean sampling.max_new_tokens?"),
        (["shard.zzz=3"], "unknown key shard.zzz: known keys: shard.index, shard.count"),
        (["max_new_tokens=3"], "unknown key max_new_tokens: did you mean sampling.max_new_tokens?"),
        (["ofload.tier=cpu"], "unknown key ofload: did you mean offload?"),
        (
            ["model.products=int8"],
            "unknown key model.products: known keys: model.name",
        ),
        (["sampling.max_new_tokens=many"], "sampling.max_new_tokens must be a whole number, got 'many'"),
        (["sampling.max_new_tokens=3.7"], "sampling.max_new_tokens must be a whole number, got 3.7"),
        (["sampling.max_new_tokens=true"], "sampling.max_new_tokens must be a whole number, got true"),
        (["sampling.max_new_tokens=null"], "sampling.max_new_tokens must be a whole number, got null"),
        (["sampling.temperature=hot"], "sampling.temperature must be a finite number or null, got 'hot'"),
        (["offload.host_memory_gib=.inf"], "offload.host_memory_gib must be a finite number or null, got inf"),
        (["sampling.top_p=.nan"], "sampling.top_p must be a finite number or null, got nan"),
        (["sampling.ignore_eos=1"], "sampling.ignore_eos must be true or false, got 1"),
        (["sampling.stop={a: b}"], "sampling.stop must be a list, each item text or null, got {'a': 'b'}"),
        (["sampling.stop=[[1]]"], "sampling.stop[0] must be text, got [1]"),
        (["sampling=3"], "sampling must be a group of keys, got 3"),
        (["offload.tier=disk"], "offload.tier must be one of auto, none, cpu, nvme, got 'disk'"),
        (["prefetch.kind=off"], "prefetch.kind must be one of off, lookahead, block, cost_aware, got false"),
        (["model.dtype=bf16"], "model.dtype must be one of auto, float32, bfloat16, float16, got 'bf16'"),
        (["run=${nowhere}"], "run cannot be resolved: Interpolation key 'nowhere' not found"),
        (["run=???"], "run cannot be resolved: Missing mandatory value: run"),
        (["run=../elsewhere"], "run must be letters, digits, '.', '_' and '-'"),
        (["run=.hidden"], "run must be letters"),
        (["output_root=''"], "output_root is empty"),
        (["model.name=hf"], "model.path is not set: model=hf needs a local directory or a hub id"),
        (["model.path=some/where"], "model=tiny is bundled and takes no model.path, got 'some/where'"),
        (["shard.index=4", "shard.count=4"], "shard.index must be 0 to 3"),
        (["sampling.top_p=0"], "sampling.top_p must be in (0, 1], got 0.0"),
        (["kv.tier=disk"], "kv.tier must be one of auto, device, cpu, nvme, got 'disk'"),
        (["kv.device_fraction=1.5"], "kv.device_fraction must be 0 to 1, got 1.5"),
        (["kv.num_slots=0"], "kv.num_slots must be 1 to 64, got 0"),
        (["kv.directory=' '"], "kv.directory is empty"),
        (["sampling.n=0", "sampling.temperature=1"], "sampling.n must be 1 to 10,000 samples, got 0"),
        (["sampling.n=4"], "sampling.n=4 needs sampling.temperature above 0"),
        (["sampling.min_new_tokens=-1"], "sampling.min_new_tokens must be 0 to 100,000,000, got -1"),
        (["sampling.min_new_tokens=33"], "sampling.min_new_tokens=33 is above sampling.max_new_tokens=32"),
        (["sampling.no_repeat_ngram_size=-1"], "sampling.no_repeat_ngram_size must be 0 (off) or more, got -1"),
        (["sampling.logprobs=-1"], "sampling.logprobs must be 0 (off) or more, got -1"),
        (["sampling.bad_words=['']"], "sampling.bad_words holds an empty string"),
        (
            ["policy.schedule=flexgen", "offload.tier=nvme", "prefetch={kind: 'off'}"],
            "policy.schedule=flexgen reads a stage during the previous one, which prefetch=off forbids",
        ),
    ],
)
def test_refusal_is_one_line_that_names_the_key(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        generate(*overrides)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2


def test_every_key_is_either_semantic_or_operational() -> None:
    config = generate()
    text, work = semantic(config), operational(config)
    groups = {key.rpartition(".")[0] for key in known_keys(GenerateConfig)}
    assert not text.keys() & work.keys()
    unset = {f"sampling.{key}" for key, value in vars(config.sampling).items() if value is None}
    told = set(known_keys(GenerateConfig)) - groups - {"sampling.transformers"} | {
        f"sampling.{key}" for key in PASSTHROUGH_KEYS
    }
    assert text.keys() | work.keys() | unset | {"sampling.follow_model", "on_end"} == told


def test_a_setting_that_is_off_leaves_a_run_of_before_it_existed_its_name_and_manifest() -> None:
    before = {
        "n", "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
        "no_repeat_ngram_size", "bad_words", "seed", "ignore_eos", "stop", "logprobs",
    }  # fmt: skip
    assert {key for key in semantic(generate()) if key.startswith("sampling.")} == {f"sampling.{key}" for key in before}


@pytest.mark.parametrize(
    "override",
    [
        "model={name: hf, path: elsewhere}",
        "model.dtype=float16",
        "dataset.limit=3",
        "sampling.seed=1",
        "sampling.stop=[x]",
        "sampling.logprobs=1",
        "sampling.follow_model=true",
        "sampling.transformers={suppress_tokens: [5]}",
        "sampling.transformers={forced_bos_token_id: 0}",
        "sampling.transformers={sequence_bias: [[[5,6],-2]]}",
        "dataset={kind: jsonl, path: x, stop_field: s}",
        "policy.micro_batch_size=8",
        "kv.dtype=int8",
    ],
)
def test_what_can_change_the_text_changes_the_run(override: str) -> None:
    assert semantic(generate(override)) != semantic(generate())
    assert run_name(generate(override)) != run_name(generate())


def test_what_is_passed_on_to_transformers_is_kept_by_its_own_names() -> None:
    """So a run goes on that was begun when each of them was a setting of its own."""
    config = generate("sampling.transformers={typical_p: 0.9, min_length: 3}", "sampling.temperature=1")
    kept = {key: value for key, value in semantic(config).items() if key not in semantic(generate())}
    assert kept == {"sampling.typical_p": 0.9, "sampling.min_length": 3}
    assert run_name(config) == "tiny-tasks-7631cd5642"
    assert semantic(generate("sampling.transformers=null")) == semantic(generate())


def test_weights_that_are_rounded_make_another_run() -> None:
    quantized, plain = generate("model.quantize=int8", "offload.tier=none"), generate("offload.tier=none")
    assert semantic(quantized) != semantic(plain)
    assert run_name(quantized) != run_name(plain)


@pytest.mark.parametrize(
    "override",
    [
        "offload={tier: nvme, host_memory_gib: 1}",
        "prefetch.kind=block",
        "kv={tier: nvme, device_fraction: 0.5, num_slots: 2, directory: elsewhere}",
        "machine={name: cpu, device: cpu, num_threads: 2}",
        "output_root=elsewhere",
        "log_level=debug",
        "model.verify=full",
    ],
)
def test_how_the_work_is_done_leaves_the_run_as_it_is(override: str) -> None:
    assert semantic(generate(override)) == semantic(generate())
    assert operational(generate(override)) != operational(generate())
    assert run_name(generate(override)) == run_name(generate())


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (("dataset.kind=sample",), "tiny-sample-e87e37ce31"),
        (
            ("model={name: hf, path: /x/llama}", "sampling={temperature: 0.8, seed: 3}", "dataset.kind=sample"),
            "llama-sample-773717de31",
        ),
    ],
)
def test_a_run_is_named_after_what_is_set_otherwise_than_by_default(overrides: tuple[str, ...], name: str) -> None:
    """So a command finds its run still when a later version has more keys, or fewer."""
    assert run_name(generate(*overrides)) == name


def test_semantic_keys_can_be_written_as_json() -> None:
    keys = semantic(generate("sampling.stop=[a]"))
    assert json.loads(json.dumps(keys, allow_nan=False)) == keys
    assert keys["sampling.stop"] == ["a"]
    assert keys["dataset.kind"] == "tasks"


def test_shards_of_a_run_share_its_name() -> None:
    first, second = (generate("shard.count=4", f"shard.index={i}") for i in range(2))
    assert run_name(first) == f"{run_name(generate())}-00000-of-00004"
    assert run_name(second) == f"{run_name(generate())}-00001-of-00004"
    assert run_name(generate("run=mine", "shard.count=2")) == "mine-00000-of-00002"


@pytest.mark.parametrize("path", ["../..", "/data/models/Big Model/", "owner/näme\n"])
def test_run_name_is_a_plain_file_name(path: str) -> None:
    config = load(GenerateConfig, OmegaConf.create({"model": {"name": "hf", "path": path}}))
    name = run_name(config)
    assert load(GenerateConfig, OmegaConf.create({"run": name})).run == name


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        (["policy.schedule=flexgen", "prefetch={kind: 'off'}"], []),  # nothing streams
        (["sampling.temperature=1", "sampling.top_k=4"], []),
        (["sampling.top_k=4", "sampling.top_p=0.5", "sampling.min_p=0.1"], ["top_k", "top_p", "min_p"]),
        (["sampling.top_k=4", "dataset={kind: jsonl, path: x, temperature_field: t}"], []),
        (["sampling.min_new_tokens=4"], []),
        (["sampling.min_new_tokens=4", "sampling.ignore_eos=true"], ["sampling.min_new_tokens"]),
        (["sampling.transformers.min_length=4", "sampling.ignore_eos=true"], ["sampling.min_length"]),
        (["sampling.transformers={top_h: 0.5, typical_p: 0.5, eta_cutoff: 0.1}"], ["top_h", "typical_p", "eta"]),
        (["sampling={follow_model: true, temperature: null, top_k: 4}"], []),
    ],
)
def test_settings_without_effect_are_named(overrides: list[str], keys: list[str]) -> None:
    warnings = settings_warnings(generate(*overrides))
    assert len(warnings) == len(keys)
    assert all(key in warning for key, warning in zip(keys, warnings, strict=True))


def test_a_config_is_built_again_from_its_plain_values() -> None:
    words = ["offload.tier=nvme", "prefetch={kind: 'off'}", "sampling.stop=['a: b']", "model.dtype=bfloat16"]
    config = generate(*words, "sampling.transformers={typical_p: 0.9, suppress_tokens: [5]}")
    assert build(GenerateConfig, json.loads(json.dumps(to_settings(config)))) == config


def test_runtime_gets_its_groups_unchanged() -> None:
    config = generate("sampling.seed=5", "offload.tier=cpu")
    assert config.runtime.sampling is config.sampling
    assert config.runtime.offload is config.offload


def test_architecture_takes_any_key_of_transformers() -> None:
    config = synthesize("architecture.rope_parameters.rope_theta=5.0", "architecture.hidden_size=64")
    assert config.architecture == {"model_type": "llama", "rope_parameters": {"rope_theta": 5.0}, "hidden_size": 64}
    assert config.dtype is DType.bfloat16


def test_a_model_without_an_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match="model=hf has no architecture: choose another model, or set one with"):
        load(SynthesizeConfig, OmegaConf.from_dotlist(["out=x", "model.name=hf"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("out=null", "out is not set"),
        ("dtype=auto", "dtype must be float32, bfloat16 or float16"),
        ("max_shard_gib=0", "max_shard_gib must be above 0 GiB"),
        ("alignment_bytes=12", "alignment_bytes must be a multiple of 8 bytes"),
        ("architecture.model_type=null", "architecture.model_type must name a model type"),
        ("architecture=llama", "architecture must be a group of keys"),
        ("sead=1", "unknown key sead: did you mean seed?"),
    ],
)
def test_synthesize_refuses_in_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        synthesize(override)
    assert str(refused.value).startswith(message)


ABSURD = [
    "machine.num_threads=100000", "dataset.limit=100000000000000000000", "dataset.repeat=1000000000",
    "sampling.n=1000000", "sampling.max_new_tokens=2000000000", "offload.host_memory_gib=1e30",
    "offload.device_memory_gib=1e30",
    "shard.count=10000000000", "dataset.max_row_bytes=1000000000000",
]  # fmt: skip


@pytest.mark.parametrize("override", ABSURD)
def test_an_absurd_number_is_refused_with_its_key_the_bound_and_itself(override: str) -> None:
    key, value = override.split("=")
    with pytest.raises(ConfigError) as error:
        generate(override, "sampling.temperature=1")
    text = str(error.value)
    assert key in text
    assert f"got {float(value) if 'e' in value else value}" in text
    assert re.search(r"\d,\d{3}", text), "the bound"
    assert "\n" not in text
