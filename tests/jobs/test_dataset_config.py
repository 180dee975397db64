import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from jobs.datasets import DatasetConfig, DatasetKind, ShardConfig, kinds
from runtime.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf" / "dataset"
WITHOUT_PATH = {DatasetKind.sample, DatasetKind.tasks, DatasetKind.prompt, DatasetKind.helm_synthetic_reasoning}


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("dataset.path", {"kind": DatasetKind.mtbench}),
        ("dataset.path", {"kind": DatasetKind.jsonl, "path": ""}),
        ("dataset.path", {"kind": DatasetKind.sample, "path": "a.jsonl"}),
        ("did you mean dataset=csv?", {"path": "a.csv.gz"}),
        ("did you mean dataset=parquet?", {"kind": DatasetKind.sample, "path": "a.parquet"}),
        ("dataset.prompt_field", {"kind": DatasetKind.mtbench, "path": "a", "prompt_field": "question"}),
        ("dataset.prompt_field", {"kind": DatasetKind.csv, "path": "a", "prompt_field": ""}),
        ("dataset.trial", {"kind": DatasetKind.jsonl, "path": "a", "trial": 1}),
        ("dataset.trial", {"kind": DatasetKind.helm_synthetic_reasoning, "trial": -1}),
        ("dataset.num_examples", {"kind": DatasetKind.helm_synthetic_reasoning, "num_examples": -1}),
        ("dataset.messages_field", {"kind": DatasetKind.jsonl, "path": "a", "messages_field": "chat"}),
        ("dataset.messages_field", {"kind": DatasetKind.csv, "path": "a", "messages_field": "chat"}),
        ("dataset.id_field", {"kind": DatasetKind.jsonl, "path": "a", "id_field": ""}),
        ("dataset.stop_field", {"kind": DatasetKind.mtbench, "path": "a", "stop_field": "stop"}),
        ("dataset.system_prompt", {"system_prompt": "Be brief."}),
        ("dataset.csv_delimiter", {"kind": DatasetKind.csv, "path": "a", "csv_delimiter": "::"}),
        ("dataset.limit", {"limit": 0}),
        ("dataset.repeat", {"repeat": 0}),
        ("dataset.window_tokens", {"kind": DatasetKind.helm_summarization, "path": "a", "window_tokens": 64}),
    ],
)
def test_an_impossible_setting_is_refused_by_its_key(key, settings):
    with pytest.raises(ConfigError, match=re.escape(key)):
        DatasetConfig(**settings)


@pytest.mark.parametrize(("index", "count"), [(0, 0), (1, 1), (-1, 2), (3, 3)])
def test_a_shard_outside_its_count_is_refused(index, count):
    with pytest.raises(ConfigError, match=r"shard\."):
        ShardConfig(index=index, count=count)


@pytest.mark.parametrize("kind", list(DatasetKind))
def test_every_kind_has_a_yaml_that_sets_nothing_to_its_default(kind):
    chosen = dict(OmegaConf.load(CONF / f"{kind.value}.yaml"))
    assert chosen.pop("kind") == kind.value
    defaults = {field.name: field.default for field in fields(DatasetConfig)}
    assert {key for key, value in chosen.items() if defaults[str(key)] == value} == set()


@pytest.mark.parametrize("kind", list(DatasetKind))
def test_every_yaml_fits_the_schema(kind):
    schema = OmegaConf.structured(DatasetConfig)
    OmegaConf.set_readonly(schema, None)
    path = {} if kind in WITHOUT_PATH else {"path": "somewhere"}
    config = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.load(CONF / f"{kind.value}.yaml"), path))
    assert isinstance(config, DatasetConfig)
    assert config.kind is kind


def test_every_module_of_kinds_has_some_and_no_two_have_the_same() -> None:
    paths = sorted((CONF.parents[1] / "jobs" / "datasets" / "kinds").glob("*.py"))
    found = [list(import_module(f"{kinds.__name__}.{path.stem}").KINDS) for path in paths if path.stem != "__init__"]
    assert [] not in found
    assert sorted(name for names in found for name in names) == sorted(DatasetKind.__members__)


def test_importing_the_package_imports_neither_torch_nor_datasets():
    code = "import sys, jobs.datasets; print([name for name in ('torch', 'datasets', 'hydra') if name in sys.modules])"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
