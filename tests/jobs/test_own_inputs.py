"""`plan` for a model and a data set of one's own: the sizes that a run plans with, and the lengths of its prompts."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.config.settings import read_yaml
from jobs.config.typed import build
from jobs.planning.config import PlanConfig, WorkloadConfig
from jobs.planning.named import CONF
from jobs.planning.own_inputs import read_own_shape
from jobs.planning.planning import make_plan, with_prompts
from jobs.planning.report import format_plan
from runtime import Runtime, RuntimeConfig
from runtime.checkpoint_source.location import BUNDLED
from runtime.config.settings import DType, MachineConfig, ModelConfig, SamplingConfig
from runtime.errors import CheckpointError, ConfigError, DatasetError
from tests.quantized import write_fp8
from tests.support import Reference


def own(path: Path) -> ModelConfig:
    return ModelConfig(name="hf", path=str(path))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_shape_is_that_of_a_run(family: str, reference: Callable[[str], Reference]) -> None:
    model = own(reference(family).directory)
    with Runtime(RuntimeConfig(model=model)) as runtime:
        shape, stored = read_own_shape(model, DType.float32, None, is_plain=False, has_device=False)
        assert shape.stages == runtime.model.shape.stages
        assert shape.kv_layer_bytes == runtime.model.shape.kv_layer_bytes
        assert stored == runtime.model.stored


def test_config_json_alone_gives_the_sizes_of_the_weights(tmp_path: Path) -> None:
    shutil.copy(BUNDLED / "config.json", tmp_path)
    whole, _ = read_own_shape(own(BUNDLED), DType.bfloat16, None, is_plain=True, has_device=True)
    alone, stored = read_own_shape(own(tmp_path), DType.bfloat16, None, is_plain=True, has_device=True)
    assert stored is None
    assert alone.context_tokens == whole.context_tokens
    assert alone.weight_bytes == pytest.approx(whole.weight_bytes, rel=0.02)


def test_a_quantized_config_is_planned_as_it_is_stored(tmp_path: Path) -> None:
    config = json.loads((BUNDLED / "config.json").read_text())
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "unknown": 1, "quantization_config": quantized}))
    stored, plain = (
        read_own_shape(own(tmp_path), DType.bfloat16, None, is_plain=is_plain, has_device=True)[0]
        for is_plain in (False, True)
    )
    assert stored.weight_bytes < 0.5 * plain.weight_bytes


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, CheckpointError, "has no config.json"),
        ({"config.json": "{"}, CheckpointError, "config.json"),
        ({"config.json": '{"model_type": "no-such"}'}, ConfigError, "unknown model type 'no-such'"),
        ({"config.json": "{}"}, ConfigError, "has no model_type"),
    ],
    ids=["nothing", "no JSON", "unknown type", "no type"],
)
def test_a_directory_that_is_no_model_is_refused(
    files: dict[str, str], error: type[Exception], message: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        read_own_shape(own(tmp_path), DType.bfloat16, None, is_plain=False, has_device=True)


def test_a_hub_id_that_cannot_be_reached_names_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"model\.path=org/none: config\.json is neither here nor in the hub's cache"):
        read_own_shape(own(Path("org/none")), DType.bfloat16, None, is_plain=False, has_device=True)


def test_layers_of_a_quantized_checkpoint_are_named_once(reference: Callable[[str], Reference], tmp_path: Path) -> None:
    path, _ = write_fp8(reference("llama").directory, tmp_path / "fp8", (32, 32))
    known = WorkloadConfig(num_requests=2, mean_prompt_tokens=8, max_prompt_tokens=9)
    planned = make_plan(replace(plan_config(tmp_path / "none.jsonl", known), model=own(path)))
    _, *lines = format_plan(planned, 0).partition("\n\n")[0].splitlines()
    layers = "self_attn (q_proj, k_proj, v_proj, o_proj), mlp (gate_proj, up_proj, down_proj)"
    assert sorted(line.split(maxsplit=3)[3] for line in lines) == ["embed_tokens, vectors, lm_head", layers]


def plan_config(path: Path, workload: WorkloadConfig | None = None, **dataset: str | int) -> PlanConfig:
    return PlanConfig(
        model=own(BUNDLED),
        machine=build(MachineConfig, read_yaml(CONF / "machine" / "l4.yaml")),
        dataset={"kind": "jsonl", "path": str(path), **dataset},
        workload=workload or WorkloadConfig(),
        sampling=SamplingConfig(max_new_tokens=4),
    )


def test_prompts_are_counted_by_the_model_s_tokenizer(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    texts = [f"What is {number} + 1?" for number in range(700)] + ["word " * 50]
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts) + "no JSON\n")
    with Runtime(RuntimeConfig(model=own(BUNDLED))) as runtime:
        lengths = [len(ids) for ids in runtime.tokenize(texts)]
    found = with_prompts(plan_config(rows)).workload
    assert found.num_requests == 701
    assert found.max_prompt_tokens == max(lengths)
    assert found.mean_prompt_tokens == pytest.approx(sum(lengths) / len(lengths), rel=0.1)
    assert with_prompts(plan_config(rows, limit=3)).workload.num_requests == 3
    given = WorkloadConfig(num_requests=9, max_prompt_tokens=99)
    assert with_prompts(plan_config(rows, given)).workload.num_requests == 9
    assert with_prompts(plan_config(rows, given)).workload.max_prompt_tokens == 99
    assert len(make_plan(plan_config(rows, limit=3)).sizes) == 3


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("no JSON\n", {}, "none of 1 row"),
        ("", {}, "rows"),
        ('{"prompt": "a"}\n', {"prompt_field": "b"}, "no row has the field 'b'"),
        ('{"prompt": "a"}\n', {"pth": "b"}, r"unknown key dataset\.pth: did you mean dataset\.path"),
    ],
    ids=["no JSON", "empty", "wrong field", "wrong key"],
)
def test_a_file_without_prompts_is_refused(text: str, settings: dict[str, str], message: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text)
    with pytest.raises((ConfigError, DatasetError), match=message):
        with_prompts(plan_config(rows, None, **settings))
