"""A finished run is recognized by the sizes and times of its inputs; whatever changed leads to the full comparison."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.record.finished import find_finished, input_state, record_inputs
from jobs.record.run_dir import RunDirectory
from jobs.record.summary import Outcome
from jobs.run.command import run_command
from jobs.run.tasks.generate import generate
from runtime.config.settings import ModelConfig, PolicyConfig, PolicyKind, SamplingConfig, Verify
from runtime.errors import ConfigError, DatasetError
from tests.jobs.killing import start_job


def config_in(root: Path) -> GenerateConfig:
    (root / "in.jsonl").write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"{i} + 1"}) + "\n" for i in range(4)))
    return GenerateConfig(
        run="case",
        output_root=str(root),
        dataset=DatasetConfig(kind=DatasetKind["jsonl"], path=str(root / "in.jsonl"), id_field="id"),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=1),
        sampling=SamplingConfig(max_new_tokens=3),
    )


def finish(config: GenerateConfig) -> Outcome:
    state = input_state(config)
    assert find_finished(config, state) is None
    outcome = generate(config, lambda: False)
    record_inputs(outcome.directory, state)
    return outcome


def run_of(root: Path) -> RunDirectory:
    return RunDirectory(path=root / "generate" / "case")


def test_a_finished_run_has_the_outcome_of_a_full_start(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    finish(config)
    assert find_finished(config, input_state(config)) == generate(config, lambda: False)


def cut_part(root: Path) -> None:
    part = run_of(root).generations_part(0)
    part.write_bytes(part.read_bytes()[:-8])


def edit_data(root: Path) -> None:
    path = root / "in.jsonl"
    found = path.stat()
    path.write_text(path.read_text().replace("3 + 1", "7 + 1"))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))  # same size, same time of change


def write_success(root: Path) -> None:
    path = run_of(root).success
    path.write_text(path.read_text().replace('"ok": 4', '"ok": 5'))


CHANGES: dict[str, Callable[[Path], object]] = {
    "a part is damaged": cut_part,
    "a part is gone": lambda root: run_of(root).generations_part(0).unlink(),
    "its passes are gone": lambda root: run_of(root).throughput_part(0).unlink(),
    "the input was edited": edit_data,
    "the input was replaced by a pipe": lambda root: ((root / "in.jsonl").unlink(), os.mkfifo(root / "in.jsonl")),
    "the input is gone": lambda root: (root / "in.jsonl").unlink(),
    "the success file was edited": write_success,
    "no success file": lambda root: run_of(root).success.unlink(),
    "no plan": lambda root: run_of(root).plan.unlink(),
    "the state is no JSON": lambda root: run_of(root).inputs.write_text("{"),
    "the state is another": lambda root: run_of(root).inputs.write_text('{"state": "0"}'),
    "the state is a directory": lambda root: (run_of(root).inputs.unlink(), run_of(root).inputs.mkdir()),
}


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_leads_to_the_full_comparison(what: str, tmp_path: Path) -> None:
    config = config_in(tmp_path)
    finish(config)
    CHANGES[what](tmp_path)
    assert find_finished(config, input_state(config)) is None


def test_another_setting_or_version_is_another_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path)
    longer = replace(config, sampling=SamplingConfig(max_new_tokens=4))
    states = [input_state(config), input_state(longer)]
    monkeypatch.setattr("jobs.record.finished.__version__", "0.0.1")
    states.append(input_state(config))
    assert None not in states
    assert len({*states}) == 3


def test_inputs_that_may_change_unseen_have_no_state(tmp_path: Path) -> None:
    config = config_in(tmp_path)

    def with_model(**settings: object) -> GenerateConfig:
        return replace(config, model=ModelConfig(**settings))  # type: ignore[arg-type]

    assert input_state(with_model(name="hf", path="org/name")) is None
    assert input_state(with_model(name="hf", path="s3://bucket/model")) is None
    assert input_state(with_model(verify=Verify.full)) is None
    assert input_state(with_model(name="hf", path="org/name", revision="0" * 40)) is not None
    assert input_state(replace(config, output_url="s3://bucket/run")) is None


def test_a_link_that_leads_to_itself_ends(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "again").symlink_to(model)
    (model / "config.json").write_text("{}")
    input_state(replace(config, model=ModelConfig(name="hf", path=str(model))))


def test_a_second_start_of_a_finished_run_loads_no_torch(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    words = [f"output_root={tmp_path}", "run=case", f"dataset.path={config.dataset.path}", "sampling.max_new_tokens=3"]
    program = (
        "import atexit, runpy, sys; "
        "atexit.register(lambda: print(*sorted({'torch', 'numba'} & set(sys.modules)), 'end')); "
        "runpy.run_module('jobs.generate', run_name='__main__', alter_sys=True)"
    )
    out = tmp_path / "answers.csv"
    words += ["dataset.kind=jsonl", f"out={out}"]
    first = start_job(*words)
    first.join()
    assert first.exitcode == 0
    assert out.read_text().count("\n") == 5  # a header and four rows
    out.unlink()
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "nothing to do" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "end"
    assert out.read_text().count("\n") == 5


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("answers.txt", "must end in one of .jsonl, .csv, .parquet"),
        ("in.jsonl", "was not written by an export or was changed since"),
        ("", "must end in one of"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_opened(
    name: str, reason: str, tmp_path: Path
) -> None:
    config = replace(config_in(tmp_path), out=str(tmp_path / name))
    with pytest.raises(ConfigError, match=re.escape(reason)):
        run_command(config, lambda: pytest.fail("opened"), lambda _: None, at=0.0, clock=0.0)


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"prompt_field": "question"}, DatasetError, "question"),
        ({"path": "no.jsonl"}, DatasetError, "does not exist"),
    ],
)
def test_a_wrong_field_is_refused_before_the_model_is_opened(
    change: dict[str, str], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    config = config_in(tmp_path)
    config = replace(config, dataset=replace(config.dataset, **change))  # type: ignore[arg-type]
    with pytest.raises(error, match=reason):
        run_command(config, lambda: pytest.fail("opened"), lambda _: None, at=0.0, clock=0.0)


def test_an_output_root_that_is_a_file_is_refused_before_the_model_is_opened(tmp_path: Path) -> None:
    config = replace(config_in(tmp_path), output_root=str(tmp_path / "in.jsonl"))
    with pytest.raises(ConfigError, match="Choose another output_root="):
        run_command(config, lambda: pytest.fail("opened"), lambda _: None, at=0.0, clock=0.0)
