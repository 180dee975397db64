"""Files that safetensors itself reads back, published whole or not at all, one tensor in memory at a time."""

import gc
import json
import resource
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from runtime.errors import OutputError
from runtime.store.writer import (
    INDEX_FILE,
    PAGE_BYTES,
    TensorSpec,
    plan_shards,
    write_checkpoint,
    write_safetensors,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
SHAPES = ((3, 5), (), (0,), (7,), (2, 3, 4))


def make(spec: TensorSpec) -> torch.Tensor:
    values = torch.arange(spec.num_elements, dtype=torch.int64) % 2
    return values.to(spec.dtype).view(spec.shape)


def specs_of(*num_elements: int) -> list[TensorSpec]:
    return [
        TensorSpec(name=f"layers.{index}.weight", dtype=torch.float32, shape=(count,))
        for index, count in enumerate(num_elements)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_reads_back_every_dtype_and_shape(dtype: torch.dtype, tmp_path: Path) -> None:
    specs = [TensorSpec(name=f"t{index}", dtype=dtype, shape=shape) for index, shape in enumerate(SHAPES)]
    path = tmp_path / "model.safetensors"
    num_bytes = write_safetensors(path, specs, map(make, specs))
    assert path.stat().st_size == num_bytes
    loaded = load_file(path)
    assert list(loaded) == [spec.name for spec in specs]
    for spec in specs:
        assert loaded[spec.name].dtype == dtype
        assert torch.equal(loaded[spec.name], make(spec))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name_length", [1, 3800, 3900, 4000, 5000])
def test_data_starts_on_a_page_of_the_file(name_length: int, tmp_path: Path) -> None:
    spec = TensorSpec(name="n" * name_length, dtype=torch.float32, shape=(4,))
    path = tmp_path / "model.safetensors"
    write_safetensors(path, [spec], [make(spec)])
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + header_bytes) % 4096 == 0
    assert torch.equal(load_file(path)[spec.name], make(spec))


def test_a_transposed_tensor_is_written_in_its_logical_order(tmp_path: Path) -> None:
    spec = TensorSpec(name="w", dtype=torch.float32, shape=(3, 2))
    tensor = torch.arange(6.0).view(2, 3).T
    write_safetensors(tmp_path / "f", [spec], [tensor])
    assert torch.equal(load_file(tmp_path / "f")["w"], tensor)


@pytest.mark.parametrize(
    ("num_elements", "max_shard_bytes", "expected"),
    [
        ((10, 10), 80, [2]),  # both fit exactly
        ((10, 10), 79, [1, 1]),
        ((10, 100, 10), 80, [1, 1, 1]),  # too large for any shard: one of its own
        ((100, 10, 10), 80, [1, 2]),
        ((5, 5, 5, 5, 5), 40, [2, 2, 1]),
    ],
)
def test_shards_are_filled_in_order(num_elements: tuple[int, ...], max_shard_bytes: int, expected: list[int]) -> None:
    shards = plan_shards(specs_of(*num_elements), max_shard_bytes)
    assert [len(specs) for specs in shards.values()] == expected
    assert [spec for specs in shards.values() for spec in specs] == specs_of(*num_elements)


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    specs = specs_of(4, 4)
    num_bytes = write_checkpoint(tmp_path, plan_shards(specs, 1000), map(make, specs))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert num_bytes == (tmp_path / "model.safetensors").stat().st_size


def test_index_says_where_every_tensor_is(tmp_path: Path) -> None:
    specs = specs_of(4, 5, 6)
    num_bytes = write_checkpoint(tmp_path, plan_shards(specs, 40), map(make, specs))
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_parameters": 15, "total_size": 60}
    assert set(index["weight_map"].values()) == {f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)}
    for spec in specs:
        assert torch.equal(load_file(tmp_path / index["weight_map"][spec.name])[spec.name], make(spec))
    assert num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_tensor_is_dropped_before_the_next_is_made(tmp_path: Path) -> None:
    specs = specs_of(4, 4, 4, 4)
    alive: list[weakref.ref[torch.Tensor]] = []

    def one_at_a_time() -> Iterator[torch.Tensor]:
        for spec in specs:
            gc.collect()
            assert not [ref for ref in alive if ref() is not None]
            tensor = make(spec)
            alive.append(weakref.ref(tensor))
            yield tensor
            del tensor

    write_checkpoint(tmp_path, plan_shards(specs, 32), one_at_a_time())
    assert len(alive) == len(specs)


def test_a_failure_half_way_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, specs_of(4), map(make, specs_of(4)))
    before = path.read_bytes()

    def broken() -> Iterator[torch.Tensor]:
        yield make(specs_of(4)[0])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_safetensors(path, specs_of(4, 4), broken())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_refused_write_is_an_output_error_and_leaves_nothing(tmp_path: Path) -> None:
    specs = specs_of(1 << 20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # stands in for a full disk
    try:
        with pytest.raises(OutputError, match=r"cannot be written: .*; it needs 4 MiB, .* are free"):
            write_safetensors(tmp_path / "model.safetensors", specs, map(make, specs))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_a_missing_directory_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file or directory; it needs"):
        write_checkpoint(tmp_path / "gone", {"f": ()}, [])


@pytest.mark.parametrize("alignment_bytes", [8, 64, PAGE_BYTES])
def test_weights_begin_at_a_multiple_and_are_read_as_written(alignment_bytes: int, tmp_path: Path) -> None:
    begins = set()
    for length in range(1, 18):
        path = tmp_path / f"{length}.safetensors"
        tensor = torch.arange(length)
        spec = TensorSpec(name="w" * length, shape=(length,), dtype=torch.int64)
        num_bytes = write_safetensors(path, [spec], [tensor], alignment_bytes=alignment_bytes)
        begin = num_bytes - spec.num_bytes
        begins.add(begin % (2 * alignment_bytes))
        assert begin % alignment_bytes == 0
        assert load_file(path)[spec.name].equal(tensor)
    assert alignment_bytes > 8 or begins == {0, 8}
