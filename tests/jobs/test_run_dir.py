import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.files.publishing import JsonValue
from jobs.record import run_dir
from jobs.record.manifest import RunManifest
from jobs.record.run_dir import RunDirectory, open_run
from runtime.errors import ConfigError, DamagedRunError, OutputError, RunInUseError, RunMismatchError, WeightstreamError

MANIFEST = RunManifest(
    semantic={
        "model.name": "mixtral",
        "model.weights": "sha256:12",
        "dataset.name": "mtbench",
        "sampling.temperature": 0.0,
        "sampling.stop": ["\n"],
    },
    operational={"offload.tier": "nvme", "prefetch.depth": 2},
    versions={"torch": "2.13", "transformers": "5.23"},
)


def changed(**semantic: object) -> RunManifest:
    keys = {key.replace("__", "."): value for key, value in semantic.items()}
    return replace(MANIFEST, semantic={**MANIFEST.semantic, **keys})  # pyright: ignore[reportArgumentType]


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file() and p.name != ".lock"
    }


def test_first_opening_makes_the_directory_and_binds_it(tmp_path: Path) -> None:
    with open_run(tmp_path / "outputs" / "generate" / "run", MANIFEST) as state:
        run = state.directory
        assert not state.is_resumed
        assert (run.generations.is_dir(), run.throughput.is_dir()) == (True, True)
        stored = json.loads(run.manifest.read_text())
    assert (stored["semantic"], stored["semantic_digest"]) == (MANIFEST.semantic, MANIFEST.digest)
    assert (stored["operational"], stored["versions"]) == (MANIFEST.operational, MANIFEST.versions)


def test_second_opening_resumes_and_rewrites_nothing(tmp_path: Path) -> None:
    open_run(tmp_path, MANIFEST).close()
    before = tree(tmp_path)
    with open_run(tmp_path, replace(MANIFEST, operational={"offload.tier": "cpu"})) as state:
        assert state.is_resumed
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("manifest", "line"),
    [
        (changed(sampling__temperature=0.7), "sampling.temperature: 0.0 -> 0.7"),
        (changed(sampling__stop=["\n", "#"]), r'sampling.stop: ["\n"] -> ["\n","#"]'),
        (changed(model__weights="sha256:13"), 'model.weights: "sha256:12" -> "sha256:13"'),
        (changed(limits__max_new_tokens=5), "limits.max_new_tokens: (absent) -> 5"),
        (changed(sampling__temperature=0), "sampling.temperature: 0.0 -> 0"),
        (changed(model__name="x" * 500), "..."),
    ],
)
def test_another_run_is_refused_with_a_diff_and_nothing_written(
    tmp_path: Path, manifest: RunManifest, line: str
) -> None:
    open_run(tmp_path, MANIFEST).close()
    before = tree(tmp_path)
    with pytest.raises(RunMismatchError) as caught:
        open_run(tmp_path, manifest)
    message = str(caught.value)
    assert line in message
    assert (message.count("->"), "1 value differs" in message, "run=" in message) == (2, True, True)
    assert max(map(len, message.splitlines())) < 250
    assert tree(tmp_path) == before
    assert caught.value.exit_code == 2


def test_diff_has_at_most_twenty_lines(tmp_path: Path) -> None:
    open_run(tmp_path, MANIFEST).close()
    with pytest.raises(RunMismatchError, match="30 values differ") as caught:
        open_run(tmp_path, changed(**{f"key{index}": index for index in range(30)}))
    lines = str(caught.value).splitlines()
    assert len([line for line in lines if " -> " in line and line.startswith("  ")]) == 20
    assert "  and 10 more" in lines


def test_other_library_versions_are_logged_and_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_run(tmp_path, MANIFEST).close()
    with open_run(tmp_path, replace(MANIFEST, versions={"torch": "2.14", "transformers": "5.23"})) as state:
        assert state.is_resumed
    assert 'torch: "2.13" -> "2.14"' in caplog.text


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (lambda stored: stored["semantic"].update({"sampling.temperature": 1.0}), DamagedRunError),
        (lambda stored: stored.pop("semantic_digest"), DamagedRunError),
        (lambda stored: stored.update(semantic=[]), DamagedRunError),
        (lambda stored: stored.update(format=4), RunMismatchError),
    ],
    ids=["settings", "digest", "kind", "format"],
)
def test_an_edited_run_json_is_refused(tmp_path: Path, edit, error: type[WeightstreamError]) -> None:
    open_run(tmp_path, MANIFEST).close()
    path = RunDirectory(path=tmp_path).manifest
    stored = json.loads(path.read_text())
    edit(stored)
    path.write_text(json.dumps(stored))
    before = tree(tmp_path)
    with pytest.raises(error, match=r"run\.json"):
        open_run(tmp_path, MANIFEST)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("text", ["", '{"semantic": {'], ids=["empty", "torn"])
def test_an_empty_or_torn_run_json_needs_a_person(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(DamagedRunError):
        open_run(tmp_path, MANIFEST)
    assert tree(tmp_path) == {"run.json": text.encode()}


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        open_run(tmp_path, MANIFEST)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_hydras_folder_logs_and_temps_of_a_killed_start_are_no_strangers(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    for name in ("generate.log", ".lock", ".run.json.7-ab.tmp"):
        (tmp_path / name).write_text("")
    with open_run(tmp_path, MANIFEST) as state:
        assert not state.is_resumed


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("file", "run="),
        ("n" * 300, "run="),
        ("file/below", "output_root="),
        ("/proc/nope/generate/mine", "output_root="),
    ],
)
def test_a_path_that_can_never_be_a_directory_is_refused_by_the_key_that_helps(
    tmp_path: Path, path: str, key: str
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=f"as a run directory: .*Choose another {key}"):
        open_run(tmp_path / path, MANIFEST)
    assert tree(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.EROFS, ConfigError), (errno.EACCES, ConfigError), (errno.ENOSPC, OutputError), (errno.EIO, OutputError)],
)
def test_what_no_retry_heals_is_refused_and_the_rest_is_resumable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[WeightstreamError]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(error, match=os.strerror(number)):
        open_run(tmp_path / "run", MANIFEST)


def test_a_file_system_that_became_read_only_is_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_run(tmp_path / "run", MANIFEST).close()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OutputError, match="EROFS"):
        open_run(tmp_path / "run", MANIFEST)


def test_two_openings_at_once_are_refused_and_closing_frees(tmp_path: Path) -> None:
    with open_run(tmp_path, MANIFEST), pytest.raises(RunInUseError, match=f"in use by pid {os.getpid()}"):
        open_run(tmp_path, MANIFEST)
    open_run(tmp_path, MANIFEST).close()


def test_a_failed_opening_frees_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(run_dir, "fsync_directory", fail)
    with pytest.raises(OutputError, match="EIO"):
        open_run(tmp_path, MANIFEST)
    monkeypatch.undo()
    with open_run(tmp_path, MANIFEST) as state:
        assert state.is_resumed


def test_losing_the_race_for_run_json_compares_with_the_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = run_dir.write_json

    def be_second(path: Path, value: JsonValue, *, exclusive: bool) -> bool:
        other = changed(sampling__temperature=0.7)
        write(path, other.to_json(), exclusive=True)
        return write(path, value, exclusive=exclusive)

    monkeypatch.setattr(run_dir, "write_json", be_second)
    with pytest.raises(RunMismatchError):
        open_run(tmp_path, MANIFEST)
