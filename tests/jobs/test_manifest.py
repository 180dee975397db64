"""Whose run it is: compared key by key, with what older versions did not record, and named after its settings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.files.publishing import JsonValue
from jobs.record.manifest import RunManifest, run_name
from jobs.record.run_dir import RunDirectory, open_run
from runtime.errors import DamagedRunError, RunMismatchError

MANIFEST = RunManifest(
    semantic={"model.name": "mixtral", "dataset.name": "mtbench", "sampling.temperature": 0.0},
    operational={"offload.tier": "nvme"},
    versions={"torch": "2.13", "transformers": "5.23"},
    facts={"config.json rms_norm_eps": 1e-5, "config.json hidden_act": "silu", "chat_template": "{{ x }}"},
    defaults={"sampling.temperature": 0.0, "sampling.new": None},
    sources={"config.json": "/models/a"},
)


def with_facts(**facts: JsonValue) -> RunManifest:
    return replace(MANIFEST, facts={**MANIFEST.facts, **{f"config.json {key}": value for key, value in facts.items()}})


def test_a_changed_fact_is_refused_naming_file_key_and_place(tmp_path: Path) -> None:
    open_run(tmp_path, MANIFEST).close()
    with pytest.raises(RunMismatchError) as refused:
        open_run(tmp_path, with_facts(rms_norm_eps=0.5))
    assert "config.json rms_norm_eps: 1e-05 -> 0.5  (from /models/a)" in str(refused.value)
    with pytest.raises(RunMismatchError, match=r"chat_template: \"{{ x }}\" -> \(absent\)"):
        open_run(tmp_path, replace(MANIFEST, facts={k: v for k, v in MANIFEST.facts.items() if "chat" not in k}))


@pytest.mark.parametrize("number", [2, 4, None])
def test_a_run_of_another_format_is_refused(number: int | None, tmp_path: Path) -> None:
    open_run(tmp_path, MANIFEST).close()
    path = RunDirectory(path=tmp_path).manifest
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": number}))
    with pytest.raises(RunMismatchError, match="this version of Weightstream reads 3"):
        open_run(tmp_path, MANIFEST)


def test_an_edited_fact_in_run_json_is_damage(tmp_path: Path) -> None:
    open_run(tmp_path, MANIFEST).close()
    path = RunDirectory(path=tmp_path).manifest
    path.write_text(path.read_text().replace("silu", "relu"))
    with pytest.raises(DamagedRunError, match="was changed after it was written"):
        open_run(tmp_path, with_facts(hidden_act="relu"))


def test_a_setting_that_is_newer_than_the_run_must_have_its_default(tmp_path: Path) -> None:
    open_run(tmp_path, MANIFEST).close()
    with open_run(tmp_path, replace(MANIFEST, semantic={**MANIFEST.semantic, "sampling.new": None})) as state:
        assert state.manifest.digest == MANIFEST.digest
    with pytest.raises(RunMismatchError, match=r"sampling\.new: \(absent\) -> 3"):
        open_run(tmp_path, replace(MANIFEST, semantic={**MANIFEST.semantic, "sampling.new": 3}))


def test_keys_that_another_version_of_transformers_knows_newly_are_logged_and_changed_ones_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_run(tmp_path, MANIFEST).close()
    with pytest.raises(RunMismatchError, match=r"config\.json new_key: \(absent\) -> 1"):
        open_run(tmp_path, with_facts(new_key=1))
    later = {"torch": "2.13", "transformers": "5.24"}
    with open_run(tmp_path, replace(with_facts(new_key=1), versions=later)) as state:
        assert state.manifest.digest == MANIFEST.digest
    assert "config.json new_key: (absent) -> 1" in caplog.text
    with pytest.raises(RunMismatchError, match="1 value differs"):
        open_run(tmp_path, replace(with_facts(new_key=1, hidden_act="relu"), versions=later))


@pytest.mark.parametrize(
    ("semantic", "prefix"),
    [
        ({"model.name": "mixtral", "dataset.name": "mtbench"}, "mixtral-mtbench-"),
        ({"model": "/data/Meta Llama/Llama-3.2 1B/", "dataset": "jsonl"}, "llama-3.2-1b-jsonl-"),
        ({"model.name": "../../etc", "dataset.name": "..\0\n"}, "etc-"),
        ({"seed": 1}, ""),
        ({"model.name": "m" * 500}, "m" * 32 + "-"),
    ],
)
def test_run_name_is_short_safe_and_ends_in_the_digest(semantic: dict[str, JsonValue], prefix: str) -> None:
    name = run_name(semantic)
    assert name.startswith(prefix)
    assert len(name) == len(prefix) + 8
    assert Path(name).name == name


def test_run_name_follows_the_semantic_settings_alone() -> None:
    assert replace(MANIFEST, operational={}, versions={}).name == MANIFEST.name
    assert replace(MANIFEST, semantic={**MANIFEST.semantic, "sampling.temperature": 0.1}).name != MANIFEST.name
    assert replace(MANIFEST, semantic=dict(reversed([*MANIFEST.semantic.items()]))).name == MANIFEST.name


def test_a_version_that_a_run_did_not_record_is_no_other_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_run(tmp_path, MANIFEST).close()
    open_run(tmp_path, replace(MANIFEST, versions={**MANIFEST.versions, "weightstream": "2.0"})).close()
    assert "other library versions" not in caplog.text
