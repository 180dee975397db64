"""What the tests of runs with a copy in an object store share: the run, and what is there of it."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.record.run_dir import RunDirectory
from jobs.run.tasks.generate import generate
from runtime.config.settings import PolicyConfig, PolicyKind, SamplingConfig
from runtime.errors import Interrupted
from runtime.remote.object_store import ObjectStore
from tests.generations import read_generations

SMALL_BLOCKS = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=2)


def config(output_root: Path, url: str | None, **changes: object) -> GenerateConfig:
    values: dict[str, object] = {
        "run": "case",
        "output_root": str(output_root),
        "output_url": url,
        "upload_retry_seconds": 0.0,
        "dataset": DatasetConfig(kind=DatasetKind["sample"], limit=12),
        "policy": SMALL_BLOCKS,
        "sampling": SamplingConfig(max_new_tokens=6),
    }
    return GenerateConfig(**(values | changes))  # pyright: ignore[reportArgumentType]


def run(output_root: Path, url: str | None, **changes: object) -> Path:
    return generate(config(output_root, url, **changes), lambda: False).directory


def stopped_after(output_root: Path, url: str, num_blocks: int, **changes: object) -> None:
    """A run that is stopped once so many of its blocks are in the store."""
    with pytest.raises(Interrupted):
        generate(config(output_root, url, **changes), lambda: num_parts(url) >= num_blocks)


def files(url: str) -> Mapping[str, bytes]:
    store = ObjectStore(f"{url}/generate/case", "output_url")
    return {name: store.read(name) for name in store.list_files(is_deep=True)}


def num_parts(url: str) -> int:
    listed = ObjectStore(f"{url}/generate/case", "output_url").list_files(is_deep=True)
    return len([name for name in listed if name.startswith("generations/")])


def rows(path: Path) -> pa.Table:
    return read_generations(RunDirectory(path=path))


def parts(path: Path) -> Mapping[str, bytes]:
    return {part.name: part.read_bytes() for part in (path / "generations").iterdir()}
