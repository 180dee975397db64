"""Runs, checkpoints and inputs in a store that speaks S3's protocol, by a real server of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.datasets import DatasetConfig, DatasetKind
from jobs.exporting.config import ExportConfig
from jobs.exporting.export import export
from runtime.checkpoint_source.location import BUNDLED
from runtime.config.settings import ModelConfig
from runtime.errors import CheckpointError, ConfigError, DatasetError, StorageError
from runtime.remote.object_store import ObjectStore
from tests.jobs.killing import run_and_kill
from tests.jobs.stored_runs import config, files, num_parts, parts, rows, run
from tests.object_store import BUCKET, CREDENTIALS, S3Server, s3_serving

ROOT = Path(__file__).resolve().parents[2]
S3 = f"s3://{BUCKET}/results"


@pytest.fixture
def server() -> Iterator[S3Server]:
    with s3_serving() as server:
        yield server


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was kept here alone."""
    return run(tmp_path_factory.mktemp("plain"), None)


def command(output_root: Path, **settings: object) -> list[str]:
    """The run of `config`, as a process."""
    words = {
        "output_root": output_root,
        "output_url": S3,
        "run": "case",
        "upload_retry_seconds": 1,
        "policy": "fixed",
        "policy.micro_batch_size": 2,
        "policy.num_micro_batches": 2,
        "dataset": "sample",
        "dataset.limit": 12,
        "sampling.max_new_tokens": 6,
    }
    return [sys.executable, "-m", "jobs.generate", *(f"{key}={value}" for key, value in (words | settings).items())]


def ended(words: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_killed_a_run_goes_on_on_another_machine_and_is_exported_from_there(
    tmp_path: Path, server: S3Server, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = config(tmp_path / "one", S3)
    run_and_kill(one, lambda: num_parts(S3) >= 1, after_seconds=0.0, environment=server.environment)
    assert 1 <= num_parts(S3) < len(parts(plain))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other-cache"))
    folder = run(tmp_path / "other", S3)
    assert rows(folder).equals(rows(plain))
    export(ExportConfig(run=f"{S3}/generate/case", out=str(tmp_path / "there.jsonl")))
    export(ExportConfig(run=str(plain), out=str(tmp_path / "here.jsonl")))
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()
    recorded = {part["file"] for part in json.loads(files(S3)["_SUCCESS.json"])["parts"]}
    assert recorded == {*parts(plain)}


@pytest.mark.slow("jobs/test_stored_run_s3.py::test_a_store_that_goes_in_a_run_leaves_what_the_next_start_takes_there")
def test_a_store_that_refuses_in_a_run_ends_it_with_75_and_nothing_is_lost(
    tmp_path: Path, server: S3Server, plain: Path
) -> None:
    server.refused = lambda method, path: method == "PUT" and "generations/part-00001" in path
    job = ended(command(tmp_path / "one"), tmp_path / "cache")
    assert job.returncode == 75, job.stderr
    assert "Traceback" not in job.stderr
    last = job.stderr.splitlines()[-1]
    for words in (f"{S3}/generate/case/generations/part-00001.parquet", "output_url", "upload_retry_seconds"):
        assert words in last
    server.refused = lambda method, path: False
    assert num_parts(S3) == 1
    assert rows(run(tmp_path / "one", S3)).equals(rows(plain))
    assert num_parts(S3) == len(parts(plain))
    kept = [path.read_text("utf-8", "replace") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    kept += [data.decode("utf-8", "replace") for data in files(S3).values()]
    said = "".join([*kept, job.stdout, job.stderr])
    assert not [secret for secret in CREDENTIALS.values() if secret in said]


def test_a_store_that_goes_in_a_run_leaves_what_the_next_start_takes_there(
    tmp_path: Path, server: S3Server, plain: Path
) -> None:
    server.goes = lambda method, path: method == "PUT" and "generations/part-00001" in path
    with pytest.raises(StorageError, match=r"part-00001\.parquet \(output_url\) failed"):
        run(tmp_path, S3)
    server.come()
    assert num_parts(S3) == 1
    assert rows(run(tmp_path, S3)).equals(rows(plain))
    assert num_parts(S3) == len(parts(plain))


@pytest.mark.parametrize("case", ["no bucket", "not ours"])
def test_a_bucket_that_is_not_there_or_not_ours_is_refused_at_once(tmp_path: Path, server: S3Server, case: str) -> None:
    if case == "not ours":
        server.refused = lambda method, path: True
    place = "s3://nowhere/results" if case == "no bucket" else S3
    began = time.monotonic()
    with pytest.raises(ConfigError, match=f"output_url={place}/generate/case"):
        run(tmp_path, place, upload_retry_seconds=300.0)
    assert time.monotonic() - began < 30


# --- what is read


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weightstream" / "copies"


def put(url: str, files: dict[str, bytes]) -> None:
    store = ObjectStore(url, "test")
    for name, data in files.items():
        store.write(name, data)


@pytest.mark.slow("jobs/test_stored_run_s3.py::test_a_model_that_is_not_there_is_refused_by_url_and_key")
def test_a_model_and_a_data_set_at_urls_give_the_rows_of_their_copies(
    tmp_path: Path, server: S3Server, cache: Path
) -> None:
    model = {path.name: path.read_bytes() for path in BUNDLED.iterdir() if path.is_file()}
    put(f"s3://{BUCKET}/models/tiny", model)
    lines = [json.dumps({"prompt": f"Sort these numbers: {i} 3 2"}) + "\n" for i in range(4)]
    put(f"s3://{BUCKET}/prompts", {"a.jsonl": "".join(lines[:2]).encode(), "b.jsonl": "".join(lines[2:]).encode()})
    (tmp_path / "all.jsonl").write_text("".join(lines), encoding="utf-8")

    def asked(name: str, place: str, path: str) -> pa.Table:
        dataset = DatasetConfig(
            kind=DatasetKind["jsonl"],
            path=path,
            template="{prompt}",
            few_shot_path=path,
            few_shot_template="{prompt} A: 1",
            num_examples=1,
        )
        folder = run(tmp_path / name, None, model=ModelConfig(name="hf", path=place), dataset=dataset)
        return rows(folder).select(["id", "prompt", "completion", "token_ids"])

    there = asked("there", f"s3://{BUCKET}/models/tiny", f"s3://{BUCKET}/prompts")
    assert there.equals(asked("here", str(BUNDLED), str(tmp_path / "all.jsonl")))
    num_gets = len(server.gets)
    assert there.equals(asked("again", f"s3://{BUCKET}/models/tiny", f"s3://{BUCKET}/prompts/"))
    assert not [path for path in server.gets[num_gets:] if path.endswith((".safetensors", ".json", "a.jsonl"))]


def test_a_model_that_is_not_there_is_refused_by_url_and_key(server: S3Server, cache: Path, tmp_path: Path) -> None:
    for place in (f"s3://{BUCKET}/nothing", "s3://nowhere/model"):
        with pytest.raises(CheckpointError, match=f"model.path={place}: no such file"):
            run(tmp_path, None, model=ModelConfig(name="hf", path=place))
    path = f"s3://{BUCKET}/nothing.jsonl"
    with pytest.raises(DatasetError, match=f"dataset.path={path}: no such file"):
        run(tmp_path, None, dataset=DatasetConfig(kind=DatasetKind["jsonl"], path=path))
