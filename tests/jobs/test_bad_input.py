"""Bad input gets a clear error that names what, where and the key; a bad row never kills a run."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jobs.config.logs import log_start
from jobs.config.settings import EncodeConfig, GenerateConfig, ScoreConfig
from jobs.datasets import DatasetConfig
from jobs.datasets.config import DatasetKind
from jobs.record.run_dir import RunDirectory
from jobs.run.tasks.converse import run_turns
from jobs.run.tasks.encode import encode
from jobs.run.tasks.generate import generate
from jobs.run.tasks.score import score
from runtime.config.settings import MachineConfig, ModelConfig, OffloadConfig, SamplingConfig, Tier
from runtime.errors import BudgetError, CheckpointError, ConfigError, DatasetError, WeightstreamError
from runtime.units import MIB
from tests.generations import read_generations
from tests.support import Reference

ROOT = Path(__file__).resolve().parents[2]


def run(output_root: Path, **changes: object) -> int:
    values: dict[str, object] = {
        "run": "case",
        "output_root": str(output_root),
        "dataset": DatasetConfig(limit=3),
        "sampling": SamplingConfig(max_new_tokens=4, ignore_eos=True),
    }
    return generate(GenerateConfig(**(values | changes)), lambda: False).exit_code  # pyright: ignore


def model_at(directory: Path | str) -> ModelConfig:
    return ModelConfig(name="hf", path=str(directory))


def copied(reference: Reference, directory: Path) -> Path:
    directory.mkdir()
    for file in reference.directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def test_missing_checkpoint_names_three_ways_on(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        run(tmp_path, model=model_at(tmp_path / "nowhere"))
    text = str(error.value)
    assert all(way in text for way in ("hf download", "model.path=", "jobs.synthesize", str(tmp_path / "nowhere")))
    assert error.value.exit_code == 2


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("model=hf model.path=/nowhere/at/all", "no weights at model.path=/nowhere/at/all"),
        ("model=mixtral dataset=jsonl dataset.path=nope.jsonl", "dataset.path=nope.jsonl does not exist"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_before_what_takes_long_is_loaded(words: str, error: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "jobs.generate", *words.split()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert error in ended.stderr
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")}
    assert "hydra" in loaded
    assert not {"torch", "transformers"} & loaded


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "xpu"])
def test_a_device_that_is_not_here_is_refused_before_a_model_is_opened(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    config = GenerateConfig(machine=MachineConfig(device=device))
    with pytest.raises(ConfigError, match=f"machine.device={device}: torch .* finds no accelerator"):
        log_start(logging.getLogger("jobs.generate"), config)
    assert "opening" not in capsys.readouterr().err


def test_hub_id_without_network_names_three_ways_on(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"jobs\.synthesize"):
        run(tmp_path, model=model_at("nobody/nothing"))


def test_truncated_shard_names_file_and_both_sizes(tmp_path: Path, reference: Callable[[str], Reference]) -> None:
    directory = copied(reference("llama"), tmp_path / "model")
    shard = min(directory.glob("model-*.safetensors"))
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 1000)
    with pytest.raises(CheckpointError) as error:
        run(tmp_path / "out", model=model_at(directory))
    assert shard.name in str(error.value)
    assert f"{size:,}" in str(error.value)
    assert f"{size - 1000:,}" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_shard_that_disagrees_with_its_index_is_named(tmp_path: Path, reference: Callable[[str], Reference]) -> None:
    directory = copied(reference("llama"), tmp_path / "model")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    tensor, shard = next(iter(content["weight_map"].items()))
    content["weight_map"][tensor] = next(name for name in content["weight_map"].values() if name != shard)
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as error:
        run(tmp_path / "out", model=model_at(directory))
    assert tensor in str(error.value)


BAD_LINES = {
    "malformed": b'{"id": "bad", "prompt": ',
    "not an object": b"[1, 2]",
    "non-UTF-8": b'{"id": "bad", "prompt": "\xff\xfe"}',
    "empty prompt": b'{"id": "bad", "prompt": ""}',
    "missing prompt": b'{"id": "bad"}',
    "longer than the context": json.dumps({"id": "bad", "prompt": "x" * 3000}).encode(),
}


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_row_becomes_an_error_row_and_the_others_are_generated(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": "a", "prompt": "one"}\n' + line + b'\n{"id": "b", "prompt": "two"}')
    dataset = DatasetConfig(kind=DatasetKind.jsonl, path=str(path), id_field="id")
    assert run(tmp_path / "out", dataset=dataset) == 3
    table = read_generations(RunDirectory(path=tmp_path / "out" / "generate" / "case")).to_pylist()
    assert sorted(row["status"] for row in table) == ["error", "ok", "ok"]
    assert {row["id"]: len(row["token_ids"]) for row in table if row["status"] == "ok"} == {"a": 4, "b": 4}
    bad = next(row for row in table if row["status"] == "error")
    assert bad["error"]


UNUSABLE: dict[str, tuple[str, bytes, dict[str, object], str]] = {
    "CSV": ("in.csv", b"id,prompt\na,p\n", {}, r"none of 2 rows of \S+in\.csv can be used; .*not JSON.*; in\.csv looks "
            r"like CSV: dataset=csv$"),
    "bad lines": ("in.jsonl", b"x\n{\n5\n", {}, r"none of 3 rows of \S+ can be used; the first: in\.jsonl, line 1"),
    "numbers": ("in.jsonl", b'{"prompt": 5}\n{"prompt": null}', {}, "none of 2 rows .*the prompt 'prompt' is a number"),
    "ids": ("in.jsonl", b'{"id": [], "prompt": "p"}', {"id_field": "id"}, "none of 1 row .*the id 'id' is a list"),
    "no field": ("in.jsonl", b'{"a": 5}\n{', {}, r"no row has the field 'prompt' \(2 rows\).*prompt_field.*'a'"),
    "no id": ("in.jsonl", b'{"prompt": "p"}', {"id_field": "id"}, r"no row has the field 'id' .*\(dataset\.id_field\)"),
    "no tools": (
        "in.jsonl",
        b'{"prompt": "p"}',
        {"tools_field": "tools", "chat_template": True},
        r"no row has the field 'tools' .*\(dataset\.tools_field\)",
    ),
    "no field of a template": (
        "in.jsonl",
        b'{"doc": {"text": "p"}}',
        {"template": "{doc.text} {doc.title}"},
        r"no row has the field 'doc\.title' .*\(dataset\.template\); its fields: 'doc'",
    ),
    "batch lines": ("in.jsonl", b'{"custom_id": "a", "body": {}}', {}, "'body'; they .* dataset=openai_batch$"),
    "cells": ("in.csv", b"id,prompt\na,\nb,\n", {"kind": DatasetKind.csv}, "none of 2 rows .*'prompt' is empty"),
    "questions": ("in.jsonl", b'{"turns": ["x"]}', {"kind": DatasetKind.mtbench}, "none of 1 row .*'question_id'"),
    "requests": ("in.json", b'{"request_states": [{}]}', {"kind": DatasetKind.helm}, "none of 1 row .*no request"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "settings", "why"), UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.parametrize("job", [GenerateConfig, ScoreConfig, EncodeConfig])
def test_a_run_none_of_whose_rows_can_be_used_is_refused_before_the_model_is_looked_for(
    job: type[GenerateConfig], name: str, content: bytes, settings: dict[str, object], why: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    given = {"kind": DatasetKind.jsonl, "path": str(tmp_path / name), **settings}
    config = job(dataset=DatasetConfig(**given), model=model_at("/nowhere"), output_root=str(tmp_path))  # pyright: ignore
    run_of = {ScoreConfig: score, EncodeConfig: encode}.get(job, generate)
    with pytest.raises(DatasetError, match=why) as error:
        run_of(config, lambda: False)  # pyright: ignore
    assert error.value.exit_code == 2


def test_chats_of_several_turns_none_of_which_can_be_begun_are_refused_before_the_model_is_looked_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "in.jsonl").write_text('{"said": [5]}\n{"said": "x"}\n')
    dataset = DatasetConfig(
        kind=DatasetKind.jsonl, path=str(tmp_path / "in.jsonl"), turns_field="said", chat_template=True
    )
    config = GenerateConfig(dataset=dataset, model=model_at("/nowhere"), output_root=str(tmp_path))
    with pytest.raises(DatasetError, match=r"none of 2 rows .*'said', turn 1 is a number"):
        next(run_turns(config, lambda: False))


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"prompt": "p"}], r"there is no field 'target' \(score\.target_field\); its fields: 'prompt'"),
        ([{"prompt": "p", "target": None}], r"there is no field 'target' \(score\.target_field\)"),
        (
            [{"prompt": "p", "target": 5}, {"prompt": ""}],
            r"the field 'target' \(score\.target_field\) is neither a text nor",
        ),
    ],
)
@pytest.mark.parametrize("window_rows", [None, 1])
def test_scores_of_targets_that_no_row_has_are_refused_before_the_model_is_looked_for(
    rows: list[dict[str, object]], why: str, window_rows: int | None, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in 2 * rows))
    dataset = DatasetConfig(kind=DatasetKind.jsonl, path=str(tmp_path / "in.jsonl"), window_rows=window_rows)
    config = ScoreConfig(dataset=dataset, model=model_at("/nowhere"), output_root=str(tmp_path))
    with pytest.raises(DatasetError, match=rf"none of {2 * len(rows)} rows of \S+ can be used; the first: {why}"):
        score(config, lambda: False)


def test_context_overflow_names_both_lengths(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 3000}))
    assert run(tmp_path / "out", dataset=DatasetConfig(kind=DatasetKind.jsonl, path=str(path))) == 3
    [row] = read_generations(RunDirectory(path=tmp_path / "out" / "generate" / "case")).to_pylist()
    assert "3,001 tokens" in row["error"]
    assert "2,048" in row["error"]


def test_duplicate_ids_are_refused_with_the_ids_and_the_key(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "same", "prompt": "one"}\n{"id": "same", "prompt": "two"}\n')
    with pytest.raises(DatasetError, match=r"same.*dataset\.dedupe|dataset\.dedupe.*same"):
        run(tmp_path / "out", dataset=DatasetConfig(kind=DatasetKind.jsonl, path=str(path), id_field="id"))


def test_too_small_a_budget_is_refused_with_the_equation_before_reading(tmp_path: Path) -> None:
    offload = OffloadConfig(tier=Tier.nvme, host_memory_gib=5 * MIB / 2**30)
    with pytest.raises(BudgetError) as error:
        run(tmp_path, offload=offload)
    text = str(error.value)
    assert "offload.host_memory_gib" in text
    assert "KV cache" in text
    assert "> 5 MiB" in text
    assert error.value.exit_code == 2


def test_unwritable_output_directory_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WeightstreamError) as error:
        run(tmp_path / "file" / "below")
    assert str(tmp_path / "file") in str(error.value)
    assert error.value.exit_code == 2


def test_impossible_values_name_the_key() -> None:
    with pytest.raises(ConfigError, match=r"offload\.host_memory_gib"):
        OffloadConfig(host_memory_gib=-1)


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("polcy.micro_batch_size=2", "policy.micro_batch_size"),
        ("policy.micro_batch_size=two", "policy.micro_batch_size"),
        ("offload=nvmee", "nvme"),
    ],
)
def test_config_errors_are_one_line_and_exit_2(override: str, named: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jobs.generate", override, f"output_root={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert named in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
