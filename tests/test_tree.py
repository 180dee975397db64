"""The tree tells one story: YAML that mirrors the dataclasses, documents that name what is there."""

import re
import tomllib
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from jobs.config.settings import GenerateConfig, SynthesizeConfig, load
from jobs.config.typed import build, key_types
from jobs.datasets.config import DatasetConfig, DatasetKind
from jobs.planning.config import PlanConfig
from runtime.config.settings import (
    DevicesConfig,
    KVConfig,
    KVTier,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    Prefetch,
    PrefetchConfig,
    SamplingConfig,
    Tier,
)

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"

GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "offload": OffloadConfig,
    "kv": KVConfig,
    "prefetch": PrefetchConfig,
    "policy": PolicyConfig,
    "dataset": DatasetConfig,
    "sampling": SamplingConfig,
    "machine": MachineConfig,
    "devices": DevicesConfig,
}
SELECTORS: dict[str, tuple[str, type[Enum]]] = {
    "offload": ("tier", Tier),
    "kv": ("tier", KVTier),
    "prefetch": ("kind", Prefetch),
    "policy": ("kind", PolicyKind),
    "dataset": ("kind", DatasetKind),
}


def tracked(*patterns: str) -> list[Path]:
    """Files of the project, without what the set-up and the runs leave in it."""
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    generated = {".venv", "build", "__pycache__", "outputs"}
    return sorted(path for path in paths if not generated & set(path.relative_to(ROOT).parts[:-1]))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def read(path: Path) -> dict[str, object]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def read_option(group: str, option: str) -> dict[str, object]:
    """An option's keys of its group, also where its file has others beside."""
    values = read(CONF / group / f"{option}.yaml")
    own = values.get(group, values)
    assert isinstance(own, dict)
    return own


COMMON = {group: set(values) for group, values in read(CONF / "generate.yaml").items() if isinstance(values, dict)}
OPTIONS = [(group, option) for group in GROUPS for option in options(group)]
TEXTS = tracked(
    "*.md",
    "docs/**/*.md",
    "jobs/data/slurm/*",
    "slurm/README.md",
    "examples/*",
    "conf/**/*.yaml",
    "Makefile",
    ".ci/run",
    ".github/workflows/*",
)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=relative)
def test_yaml_is_data(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "_target_" not in text
    assert "${now" not in text, "a timestamp in a path breaks resume"


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_has_the_keys_of_its_dataclass(group: str, option: str) -> None:
    values = read_option(group, option)
    has_path = "path" in {field.name for field in fields(GROUPS[group])}
    needs_path = has_path and option not in ("tiny", "random", "sample", "tasks")
    is_path_free = group == "dataset" and option in ("helm_synthetic_reasoning", "prompt")
    if needs_path and not is_path_free:
        values = {**values, "path": values.get("path") or "somewhere"}
    build(GROUPS[group], values, f"{group}.")
    if group == "dataset":  # a kind sets the common keys that it needs otherwise
        return
    common = COMMON.get(group, set())
    assert common.isdisjoint(values), "what any option takes is said once, in generate.yaml"
    assert common | set(values) == set(key_types(GROUPS[group]))


@pytest.mark.parametrize("group", SELECTORS)
def test_every_choice_of_the_code_is_an_option_by_its_name(group: str) -> None:
    key, choices = SELECTORS[group]
    assert options(group) == sorted(choice.name for choice in choices)
    assert {option: read(CONF / group / f"{option}.yaml")[key] for option in options(group)} == {
        option: option for option in options(group)
    }


@pytest.mark.parametrize("group", ["model", "machine"])
def test_option_is_called_by_its_name(group: str) -> None:
    assert [read_option(group, option)["name"] for option in options(group)] == options(group)


def test_defaults_of_yaml_and_code_are_the_same() -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        assert load(GenerateConfig, compose("generate")) == GenerateConfig()


def test_every_key_can_be_set_on_the_command_line() -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        composed = compose("generate")
    for field in fields(GenerateConfig):
        assert field.name in composed
        if isinstance(field.type, type) and is_dataclass(field.type):
            assert set(composed[field.name]) == set(key_types(field.type))


@pytest.mark.dealt(most=12)
@pytest.mark.parametrize("option", [option for option in options("model") if option != "hf"])
def test_architecture_follows_the_model(option: str) -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        composed = compose("synthesize", overrides=[f"model={option}", "out=somewhere"])
    config = load(SynthesizeConfig, composed)
    assert config.model.name == option
    assert config.architecture == read(CONF / "model" / f"{option}.yaml")["architecture"]
    assert set(composed) == {field.name for field in fields(SynthesizeConfig)}


def test_every_named_model_has_an_architecture() -> None:
    has_one = {option for option in options("model") if "architecture" in read(CONF / "model" / f"{option}.yaml")}
    assert has_one == set(options("model")) - {"hf"}


@pytest.mark.parametrize(("job", "schema"), [("generate", GenerateConfig), ("plan", PlanConfig)])
def test_the_architecture_of_a_model_is_no_setting_of_a_run(job: str, schema: type) -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        named = compose(job, overrides=["model=mixtral"])
        bare = compose(job, overrides=["model=hf", "model.name=mixtral", f"model.path={named.model.path}"])
    assert named.architecture.hidden_size == 4096
    assert "architecture" not in bare
    assert load(schema, named) == load(schema, bare)


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_texts_name_only_what_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    missing = [link for link in links if not (path.parent / link).exists()]
    named = re.findall(r"(?<![\w./<>*-])((?:conf|jobs|runtime|tests|\.ci)/[\w./-]*\w)(?![\w*<{/])", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    modules = re.findall(r"python -m ((?:jobs|runtime)[\w.]*\w)", text)
    homes = [ROOT / name.replace(".", "/") for name in modules]
    homes += [ROOT / "jobs" / job for job in re.findall(r"^ {4}(?:\$ )?weightstream (\w+)", text, re.MULTILINE)]
    missing += [f"{at}" for at in homes if not (at.with_suffix(".py").exists() or (at / "__main__.py").exists())]
    assert missing == []


def test_the_readme_is_short_and_its_table_too() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120] == []
    table = [line for line in lines if line.startswith("| ") and not line.startswith("| model")]
    assert (len(lines) <= 90, 0 < len(table) <= 8) == (True, True)


def test_the_architecture_is_one_page() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 80


PROMISES = [ROOT / "docs" / "explanation" / name for name in ("reliability.md", "exactness.md")]


@pytest.mark.parametrize("path", [*PROMISES, ROOT / "SECURITY.md"], ids=relative)
def test_a_promise_names_a_test_that_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", text)
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text("utf-8")]
    assert missing == []
    tables = [part.partition("\n\n")[0] for part in text.split("| promise | test |\n|---|---|\n")[1:]]
    promises = [row for table in tables for row in table.splitlines()]
    assert bool(promises) is (path in PROMISES)
    assert [row for row in promises if "`tests/" not in row] == []


@pytest.mark.parametrize("package", ["runtime", "jobs", "weightstream"])
def test_type_checkers_see_the_annotations_of_what_is_installed(package: str) -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    assert "py.typed" in data[package]
    assert (ROOT / package / "py.typed").exists()


def test_the_oldest_versions_that_are_tested_are_those_that_may_work() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = dict(re.findall(r"([a-z-]+)>=([\d.]+)", str(project["dependencies"])))
    tested = dict(re.findall(r"^([a-z-]+)==([\d.]+)$", (ROOT / "floors.txt").read_text(encoding="utf-8"), re.MULTILINE))
    assert named.keys() == tested.keys()
    for name, version in named.items():
        assert re.fullmatch(rf"{re.escape(version)}(\.0)*", tested[name]), name
