"""Files of a run are as the umask says, or their owner's alone."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig
from jobs.run.tasks.generate import generate
from runtime.config.settings import SamplingConfig
from runtime.store.kv_file import open_unnamed


@pytest.fixture(params=[0o022, 0])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def run(root: Path, **changes: object) -> Path:
    values: dict[str, object] = {
        "run": "case",
        "output_root": str(root / "out"),
        "dataset": DatasetConfig(limit=2),
        "sampling": SamplingConfig(max_new_tokens=2),
        "trace": True,
    }
    generate(GenerateConfig(**(values | changes)), lambda: False)  # pyright: ignore[reportArgumentType]
    return root / "out" / "generate" / "case"


def modes(folder: Path) -> set[tuple[bool, int]]:
    return {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in [folder, *folder.rglob("*")]}


def test_files_of_a_run_are_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    assert modes(run(tmp_path)) == {(True, 0o777 & ~umask), (False, 0o666 & ~umask)}


def test_files_of_a_private_run_are_their_owners_alone_and_the_umask_is_put_back(tmp_path: Path, umask: int) -> None:
    assert modes(run(tmp_path, output_private=True)) == {(True, 0o700), (False, 0o600)}
    (tmp_path / "later").touch()
    assert stat.S_IMODE((tmp_path / "later").stat().st_mode) == 0o666 & ~umask


def test_a_run_that_goes_on_privately_closes_its_directory(tmp_path: Path, umask: int) -> None:
    folder = run(tmp_path)
    assert run(tmp_path, output_private=True) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_keys_and_values_on_disk_are_their_owners_alone(tmp_path: Path, umask: int) -> None:
    with open_unnamed(str(tmp_path)) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
