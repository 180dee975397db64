"""What `--help` says of jobs, groups and settings, and that it is all there and right."""

import subprocess
import sys
import typing
from pathlib import Path

import pytest

import runtime
from benchmarks.config import BenchConfig
from jobs.config.help import JobSettings, help_text, option_names, read_settings_file
from jobs.config.settings import EncodeConfig, GenerateConfig, ModelsConfig, ScoreConfig, SynthesizeConfig, TraceConfig
from jobs.config.typed import enum_members, key_types, known_keys
from jobs.evaluating.config import EvaluateConfig
from jobs.exporting.config import ExportConfig
from jobs.grading.config import MetricsConfig
from jobs.measuring.config import MeasureJobConfig
from jobs.packing.config import PackConfig
from jobs.planning.config import PlanConfig
from jobs.reporting.config import ReportConfig, StatusConfig
from jobs.serving.config import ServeConfig
from runtime.errors import ConfigError
from tests.dealt import with_slow_others

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS: dict[str, type] = {
    "generate": GenerateConfig,
    "score": ScoreConfig,
    "encode": EncodeConfig,
    "evaluate": EvaluateConfig,
    "export": ExportConfig,
    "metrics": MetricsConfig,
    "report": ReportConfig,
    "status": StatusConfig,
    "plan": PlanConfig,
    "measure": MeasureJobConfig,
    "bench": BenchConfig,
    "synthesize": SynthesizeConfig,
    "pack": PackConfig,
    "models": ModelsConfig,
    "trace": TraceConfig,
    "serve": ServeConfig,
}
REFUSED = {"synthesize dtype": {"auto"}}  # by the job, of what the type would take
OF_TRANSFORMERS = "architecture."  # whose documents explain these keys


def hint_of(schema: type, key: str) -> object:
    hint: object = schema
    for name in key.split("."):
        hint = key_types(hint)[name] if isinstance(hint, type) else None
    return hint


def without_meaning(settings: JobSettings) -> list[str]:
    return [
        key for key in settings.leaf_keys() if not settings.description(key) and not key.startswith(OF_TRANSFORMERS)
    ]


def test_each_job_has_a_page() -> None:
    jobs = {path.stem for path in (ROOT / "jobs").glob("*.py") if not path.stem.startswith("_")}
    assert {path.stem for path in (ROOT / "jobs" / "data" / "help").glob("*.txt")} == jobs == set(SCHEMAS)


@pytest.mark.parametrize("job", SCHEMAS)
def test_every_key_has_a_comment_that_says_what_it_means(job: str) -> None:
    assert without_meaning(JobSettings(job, [])) == []


def test_a_key_without_a_comment_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "trace.yaml").write_text("defaults:\n  - _self_\npath: null # a file\nbegin:\n  at: 0.0\nend: 1 # s\n")
    monkeypatch.setattr("jobs.config.help.job_file", lambda job: tmp_path / f"{job}.yaml")
    assert without_meaning(JobSettings("trace", [])) == ["begin.at"]


@pytest.mark.parametrize("job", SCHEMAS)
def test_all_settings_of_a_job_are_listed_with_what_they_mean(job: str) -> None:
    settings, text = JobSettings(job, []), help_text(job, ["--help", "all"])
    listed = text.splitlines()
    for key in settings.leaf_keys():
        if not settings.names_option(key):
            [line] = [line for line in listed if line.startswith(f"  {key}=")]
            assert settings.description(key).partition(" ")[0] in text[text.index(line) :]
    assert max(map(len, listed)) <= 120


@pytest.mark.parametrize("job", SCHEMAS)
def test_a_page_leaves_no_place_unfilled_and_shows_settings_that_are_there(job: str) -> None:
    lines = help_text(job, ["--help"]).splitlines()
    shown = [line.strip().partition("=")[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert not [line for line in lines if "{settings" in line or "{options" in line]
    keys = {*JobSettings(job, []).leaf_keys()}
    assert len({*shown} & keys) >= min(3, len(keys))
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("group", JobSettings("generate", []).groups)
def test_a_page_lists_every_option_of_a_group_the_default_first(group: str) -> None:
    settings, text = JobSettings("generate", []), help_text("generate", ["--help"])
    entry = text[text.index(f"\n  {group} ") :].split(None, 1)[1].partition(":")[0]
    listed = [name.strip() for name in entry.split(",")]
    assert (listed[0], sorted(listed)) == (settings.selected_option(group), option_names(group))


@pytest.mark.parametrize("job", SCHEMAS)
def test_what_a_comment_lists_is_what_the_setting_takes(job: str) -> None:
    settings = JobSettings(job, [])
    hints = {key: hint_of(SCHEMAS[job], key) for key in settings.leaf_keys() if key in known_keys(SCHEMAS[job])}
    for key, hint in hints.items():
        if typing.get_origin(hint) not in (list, dict) and (members := enum_members(hint)):
            can_be_null = type(None) in typing.get_args(hint)
            taken = {*members, *(["null"] if can_be_null else [])} - REFUSED.get(f"{job} {key}", set())
            assert {*settings.choices(key)} == taken, key


def test_a_group_shows_its_options_and_what_the_chosen_one_means() -> None:
    text = help_text("generate", ["--help", "offload", "offload=nvme"])
    assert text.startswith("offload=OPTION, one of\n  auto ")
    assert "\n  nvme (chosen)         Weights stay on disk and are read layer by layer" in text
    assert "\n  offload.host_memory_gib=null          hard limit in host memory" in text
    assert "offload.tier" not in text


def test_a_word_that_is_neither_group_nor_key_is_refused_with_the_closest_one() -> None:
    with pytest.raises(ConfigError, match="no group or setting is named samplin: did you mean sampling"):
        help_text("generate", ["--help", "samplin"])
    assert help_text("generate", ["--help", "sampling.seed"]).startswith("  sampling.seed=0 ")


def test_a_comment_belongs_to_the_key_that_it_stands_behind_or_above(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(
        "# About the file,\n# in two lines.\n\nfirst: 1   # behind,\n           # and below it\n"
        "# above\nsecond: [1, 2] # a | b\n"
        "group:     # of keys\n  inner: 'a # b' # in it\n  bare: null\nlast: {} # the end\n         # of it\n"
    )
    found = read_settings_file(file)
    assert found.header == ["About the file,", "in two lines."]
    assert found.comments == {
        "first": "behind, and below it",
        "second": "a | b. above",
        "group": "of keys",
        "group.inner": "in it",
        "last": "the end of it",
    }


@pytest.mark.parametrize("job", with_slow_others(SCHEMAS, ["generate", "export"]))
def test_a_job_says_its_version_and_its_help_before_anything_that_takes_long_is_loaded(job: str) -> None:
    program = f"""
import runpy, sys
for asked in ("--version", "--help"):
    sys.argv = ["weightstream", asked]
    try:
        runpy.run_module("jobs.{job}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        assert ended.code == 0, ended.code
print(*({{"torch", "transformers", "matplotlib"}} & sys.modules.keys()), "loaded")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "GOMP_SPINCOUNT": "1", "PATH": ""},
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"weightstream {runtime.__version__}\n")
    assert ended.stdout.endswith("\nloaded\n") or ended.stdout.endswith("\n loaded\n")
    assert help_text(job, ["--help"]) in ended.stdout


def test_a_reader_that_leaves_early_is_no_error() -> None:
    program = f"{sys.executable} -m jobs.trace --help | head -1"
    ended = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.stderr, len(ended.stdout.splitlines())) == ("", 1)
