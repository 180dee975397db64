"""A run's copy in an object store: another machine goes on from it, and no failure of the store loses a row."""

import random
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import fsspec
import pytest

from jobs.config.settings import GenerateConfig, Workers
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.exporting.config import ExportConfig
from jobs.exporting.export import export
from jobs.record.run_reader import find_runs
from jobs.reporting.config import ReportConfig, StatusConfig
from jobs.reporting.status import read_status
from jobs.run.tasks.generate import generate
from runtime.config.settings import ModelConfig, SamplingConfig
from runtime.errors import ConfigError, Interrupted, RunInUseError, RunMismatchError, StorageError
from runtime.remote.object_store import ObjectStore
from tests.jobs.stored_runs import config, files, num_parts, parts, rows, run, stopped_after


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was kept here alone."""
    return run(tmp_path_factory.mktemp("plain"), None)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A place of its own in a store that is quick."""
    return f"memory://{tmp_path.name}-{random.random()}"


def test_a_finished_run_has_a_whole_copy_and_what_says_so_comes_last(tmp_path: Path, url: str, plain: Path) -> None:
    folder = run(tmp_path, url)
    there = files(url)
    assert {name.removeprefix("generations/") for name in there if name.startswith("generations")} == {*parts(plain)}
    for name, data in there.items():
        assert name == "writer.json" or (folder / name).read_bytes() == data
    assert {"run.json", "plan.parquet", "row_digests.parquet", "summary.json", "_SUCCESS.json"} <= there.keys()
    assert not [name for name in there if name.startswith((".", "running"))]


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("workers", list(Workers))
def test_another_machine_goes_on_from_the_copy_with_equal_bytes(
    tmp_path: Path, url: str, plain: Path, workers: Workers
) -> None:
    stopped_after(tmp_path / "one", url, 1, workers=workers)
    there = files(url)
    assert 1 <= num_parts(url) < len(parts(plain))
    assert "_SUCCESS.json" not in there
    first = {name: data for name, data in there.items() if name.startswith("generations/")}
    folder = run(tmp_path / "other", url, workers=workers)
    assert rows(folder).equals(rows(plain))
    assert first.items() <= files(url).items()
    assert (folder / "plan.parquet").read_bytes() == there["plan.parquet"]


class Killed(BaseException):
    """Ends a run as a kill would: nothing of ours catches it."""


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_write_to_the_store_a_run_ends_elsewhere_with_equal_bytes(
    stride: int, tmp_path: Path, url: str, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every fourth in `make test`."""
    write, left = ObjectStore._write, 0  # pyright: ignore[reportPrivateUsage]

    def killing(self: ObjectStore, path: str, data: bytes, exclusive: bool) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Killed
        write(self, path, data, exclusive)

    monkeypatch.setattr(ObjectStore, "_write", killing)
    for step in count(1, stride):
        place, left = f"{url}/{step}", step
        with suppress(Killed):
            run(tmp_path / f"{step}-one", place)
            break
        first = {name: data for name, data in files(place).items() if name.startswith("generations/")}
        folder = run(tmp_path / f"{step}-other", place)
        assert parts(folder) == parts(plain)
        assert first.items() <= files(place).items()
        assert "_SUCCESS.json" in files(place)
    assert step > 10


def test_what_is_generated_of_an_open_block_goes_on_elsewhere(
    tmp_path: Path, url: str, plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = iter([False] * 40 + [True] * 1000)
    with pytest.raises(Interrupted):
        generate(config(tmp_path / "one", url), lambda: next(asked))
    assert [name for name in files(url) if name.startswith("running")]
    with caplog.at_level("INFO"):
        folder = run(tmp_path / "other", url)
    assert "resuming:" in caplog.text
    assert "are partly generated, with" in caplog.text
    assert rows(folder).select(["id", "token_ids"]).equals(rows(plain).select(["id", "token_ids"]))
    assert not [name for name in files(url) if name.startswith("running")]


def test_a_finished_run_is_known_to_be_finished_elsewhere(tmp_path: Path, url: str) -> None:
    run(tmp_path / "one", url)
    before = files(url)
    outcome = generate(config(tmp_path / "other", url), lambda: False)
    assert outcome.was_finished
    assert {name: data for name, data in files(url).items() if name != "writer.json"} == {
        name: data for name, data in before.items() if name != "writer.json"
    }


def test_a_run_that_was_made_here_alone_is_taken_there_by_a_later_start(tmp_path: Path, url: str) -> None:
    folder = run(tmp_path, None)
    assert generate(config(tmp_path, url), lambda: False).was_finished
    assert files(url)["_SUCCESS.json"] == (folder / "_SUCCESS.json").read_bytes()
    assert num_parts(url) == len(parts(folder))


def test_a_part_that_is_not_in_the_store_is_taken_there_before_its_block_is_done(tmp_path: Path, url: str) -> None:
    folder = run(tmp_path, url)
    store = ObjectStore(f"{url}/generate/case", "output_url")
    name = f"generations/{min(parts(folder))}"
    store.remove(name)
    run(tmp_path, url)
    assert store.read(name) == (folder / name).read_bytes()


def test_a_part_that_is_damaged_here_is_made_again_and_replaces_nothing_wrong(
    tmp_path: Path, url: str, plain: Path
) -> None:
    folder = run(tmp_path, url)
    part = folder / "generations" / min(parts(folder))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    run(tmp_path, url)
    assert rows(folder).equals(rows(plain))
    assert files(url)[f"generations/{part.name}"] == part.read_bytes()


def test_a_part_that_is_damaged_in_the_store_is_made_again_elsewhere(tmp_path: Path, url: str, plain: Path) -> None:
    folder = run(tmp_path / "one", url)
    name = f"generations/{min(parts(folder))}"
    ObjectStore(f"{url}/generate/case", "output_url").write(name, b"half a par")
    other = run(tmp_path / "other", url)
    assert rows(other).equals(rows(plain))
    assert files(url)[name] == (other / name).read_bytes()


def test_a_start_elsewhere_takes_the_run_over_and_the_one_before_ends_at_its_next_part(
    tmp_path: Path, url: str, plain: Path
) -> None:
    is_taken = False

    def take_over() -> bool:
        nonlocal is_taken
        if not is_taken and num_parts(url):
            is_taken = True
            run(tmp_path / "other", url)
        return False

    with pytest.raises(RunInUseError, match="was taken over by pid"):
        generate(config(tmp_path / "one", url), take_over)
    assert rows(tmp_path / "other" / "generate" / "case").equals(rows(plain))
    before = files(url)
    assert rows(run(tmp_path / "one", url)).equals(rows(plain))
    assert {name: data for name, data in before.items() if name.startswith("generations")} == {
        name: data for name, data in files(url).items() if name.startswith("generations")
    }


def test_another_run_is_refused_with_a_diff_and_nothing_is_written(tmp_path: Path, url: str) -> None:
    run(tmp_path / "one", url)
    before = files(url)
    with pytest.raises(RunMismatchError, match=r"sampling\.max_new_tokens: 6 -> 7"):
        run(tmp_path / "other", url, sampling=SamplingConfig(max_new_tokens=7))
    assert files(url) == before
    assert not (tmp_path / "other").exists()


def test_a_failing_upload_loses_nothing_and_names_url_and_key(
    tmp_path: Path, url: str, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, fails = ObjectStore._write, True  # pyright: ignore[reportPrivateUsage]

    def failing(self: ObjectStore, path: str, data: bytes, exclusive: bool) -> None:
        if fails and "generations/part-00001" in path:
            raise OSError(28, "No space left on device")
        write(self, path, data, exclusive)

    monkeypatch.setattr(ObjectStore, "_write", failing)
    with pytest.raises(StorageError) as caught:
        run(tmp_path, url)
    assert caught.value.exit_code == 75
    for words in (
        f"{url}/generate/case/generations/part-00001.parquet",
        "output_url",
        "upload_retry_seconds",
        "No space",
    ):
        assert words in str(caught.value)
    fails = False
    assert num_parts(url) == 1
    folder = run(tmp_path, url)
    assert rows(folder).equals(rows(plain))
    assert num_parts(url) == len(parts(plain))


def test_a_failing_upload_is_tried_again_until_it_succeeds(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, left = ObjectStore._write, iter(range(2))  # pyright: ignore[reportPrivateUsage]

    def failing(self: ObjectStore, path: str, data: bytes, exclusive: bool) -> None:
        if "generations/" in path and next(left, None) is not None:
            raise ConnectionError("the server is gone")
        write(self, path, data, exclusive)

    monkeypatch.setattr(ObjectStore, "_write", failing)
    monkeypatch.setattr("runtime.remote.object_store.FIRST_PAUSE_SECONDS", 0.01)
    folder = run(tmp_path, url, upload_retry_seconds=60.0)
    assert num_parts(url) == len(parts(folder))
    assert caplog.text.count("retry in") == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("s3://key:secret-words@bucket/there", "contains credentials"),
        ("https://host/there?X-Amz-Signature=secret-words", "signature"),
        ("zip://a::s3://secret-words/b", "single scheme"),
    ],
)
@pytest.mark.parametrize(
    "set_it",
    [
        lambda url: GenerateConfig(output_url=url),
        lambda url: DatasetConfig(kind=DatasetKind["jsonl"], path=url),
        lambda url: ModelConfig(name="hf", path=url),
        lambda url: ModelConfig(name="hf", path="there", tokenizer=url),
        lambda url: ExportConfig(run=url, out="rows.jsonl"),
        lambda url: StatusConfig(run=url),
        lambda url: ReportConfig(run=[url]),
    ],
)
def test_a_url_that_gives_a_secret_away_is_refused_without_it(
    set_it: Callable[[str], object], wrong: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        set_it(wrong)
    assert "secret-words" not in str(caught.value)


def test_a_place_that_cannot_be_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fsspec does not know the scheme"):
        run(tmp_path, "nonsense://bucket/prefix")
    assert not list(tmp_path.iterdir())


def test_status_and_export_read_a_run_in_the_store(
    tmp_path: Path, url: str, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stopped_after(tmp_path / "one", url, 1)
    (status,) = (read_status(found) for found in find_runs([f"{url}/generate/case"], "run"))
    assert (status.run, status.state) == (f"{url}/generate/case", "unfinished")
    assert 0 < status.num_blocks_done < (status.num_blocks or 0)
    run(tmp_path / "other", url)
    (status,) = (read_status(found) for found in find_runs([f"{url}/gen*/*"], "run"))
    assert (status.state, status.num_rows_done) == ("done", 12)
    export(ExportConfig(run=f"{url}/generate/case", out=str(tmp_path / "there.jsonl")))
    export(ExportConfig(run=str(plain), out=str(tmp_path / "here.jsonl")))
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"1 runs are below it, such as .*/generate/case"):
        find_runs([url], "run")


def test_a_file_that_was_replaced_in_the_store_is_read_anew(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run(tmp_path / "one", url)
    (before,) = find_runs([f"{url}/generate/case"], "run")
    part = next(before.directory.generations.iterdir()).name
    fsspec.filesystem("memory").pipe(f"{url.removeprefix('memory://')}/generate/case/generations/{part}", b"other")
    (after,) = find_runs([f"{url}/generate/case"], "run")
    assert after.directory.path == before.directory.path
    assert (after.directory.generations / part).read_bytes() == b"other"


def test_files_can_be_kept_in_a_folder_too_and_readers_see_none_half(tmp_path: Path, plain: Path) -> None:
    stopped_after(tmp_path / "one", f"file://{tmp_path}/share", 1)
    folder = run(tmp_path / "other", f"file://{tmp_path}/share")
    assert rows(folder).equals(rows(plain))
    assert parts(tmp_path / "share" / "generate" / "case") == parts(folder)
    assert not list((tmp_path / "share").rglob(".*"))
