"""On an accelerator every tensor begins where kernels want it, and has the file's bytes."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.config.settings import ExpertPaging, Tier
from runtime.linear.stored import StoredWeight
from runtime.model.loading import LoadedModel
from runtime.plan.shape.extents import ALIGNMENT_BYTES, VECTOR_BYTES, device_layout, slot_layout
from runtime.plan.shape.shapes import Parameter, Stage, StageKind, TensorSlice
from runtime.store.reader import Reader
from runtime.stream.device import ComputeDevice
from runtime.weights.stage_weights import stage_weights
from tests.fake_device import FakeDevice
from tests.quantized import write_fp8
from tests.runtime.expert_support import DEVICE, lanes_of, load, player
from tests.support import synthesize

MIXTURE = {"moe_intermediate_size": 64}
HEADERS = [0, 4, 8, 3]  # bytes more than a multiple of 16 at which weights begin; 8 is common


def shift(directory: Path, num_bytes: int) -> Path:
    """Weights begin so many bytes behind a multiple of 16. A header may end in blanks."""
    for path in directory.glob("*.safetensors"):
        whole = path.read_bytes()
        length = int.from_bytes(whole[:8], "little")
        header = whole[8 : 8 + length].rstrip()
        header += b" " * ((num_bytes - 8 - len(header)) % 16)
        path.write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])
    return directory


def tensors_of(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """What kernels take."""
    if isinstance(weight, StoredWeight):
        yield from (block for rows in weight.entries for block in rows if isinstance(block, torch.Tensor))
    else:
        yield weight


def bound(loaded: LoadedModel, stage: Stage, device: ComputeDevice) -> dict[str, torch.Tensor]:
    """A stage's weights, moved in pieces of a page."""
    layout = slot_layout(stage)
    placed = device_layout([stage], layout)
    host, buffer = device.host_buffer(layout.num_bytes), device.compute_buffer(layout.num_bytes)
    with Reader(num_threads=1) as reader:
        reader.submit(layout.extents, host.numpy().data).wait()
    for begin, end, _ in layout.windows(ALIGNMENT_BYTES):
        for move in placed.clip_moves(begin, end):
            buffer[move.target : move.target + move.num_bytes].copy_(host[move.begin : move.end])
    return stage_weights(stage, buffer, placed.tensor_offsets, loaded.dtypes)


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("offset", HEADERS)
@pytest.mark.parametrize("is_quantised", [False, True], ids=["bf16", "fp8"])
def test_every_weight_on_a_device_is_aligned_and_has_the_files_numbers(
    is_quantised: bool, offset: int, tmp_path: Path
) -> None:
    directory = synthesize("qwen3-moe", tmp_path / "a", **MIXTURE)
    if is_quantised:
        directory = write_fp8(directory, tmp_path, (24, 64))[0]
    loaded = load(shift(directory, offset))
    for stage in loaded.shape.stages:
        layout, buffer = slot_layout(stage), FakeDevice().host_buffer(slot_layout(stage).num_bytes)
        assert device_layout([stage], layout).num_bytes <= layout.num_bytes
        with Reader(num_threads=1) as reader:
            reader.submit(layout.extents, buffer.numpy().data).wait()
        plain = stage_weights(stage, buffer, layout.tensor_offsets, loaded.dtypes)
        if offset % 2 == 0 < offset:
            assert any(tensor.data_ptr() % VECTOR_BYTES for weight in plain.values() for tensor in tensors_of(weight))
        for name, weight in bound(loaded, stage, FakeDevice()).items():
            assert all(tensor.data_ptr() % VECTOR_BYTES == 0 for tensor in tensors_of(weight)), name
            assert torch.equal(weight + 0, plain[name] + 0), name
            if isinstance(weight, StoredWeight):
                assert all(tensor.untyped_storage().nbytes() >= layout.num_bytes for tensor in tensors_of(weight)), name


def test_tensors_behind_one_of_an_odd_size_are_aligned_too() -> None:
    sizes, begin, pieces = (6, 32, 2, 4096, 16), 1000, []
    for number, num_bytes in enumerate(sizes):
        pieces.append(
            TensorSlice(
                name=str(number), file="f", offset=begin, num_bytes=num_bytes, dtype="BF16", shape=(num_bytes // 2,)
            )
        )
        begin += num_bytes
    parameters = tuple(Parameter(name=piece.name, shape=piece.shape, pieces=((piece,),)) for piece in pieces)
    stage = Stage(index=0, name="odd", kind=StageKind.layer, parameters=parameters)
    placed = device_layout([stage], slot_layout(stage))
    assert all(offset % VECTOR_BYTES == 0 for offset in placed.tensor_offsets.values())
    ends = sorted((placed.tensor_offsets[piece.name] + piece.num_bytes, piece.name) for piece in pieces)
    begins = [placed.tensor_offsets[name] for _, name in ends]
    assert all(end <= begin for (end, _), begin in zip(ends, begins[1:], strict=False))
    assert len(placed.moves) == 3  # whatever lies right as it is goes along with what is before it


def mixture_stored(names_ascend: bool, directory: Path) -> LoadedModel:
    """Experts as older files have them, whole ones in the order of their names, so that the tenth comes behind the
    first; or as newer ones do, all of one part in the order of experts."""
    synthesize("qwen3-moe", directory, num_experts=12, **MIXTURE)
    if names_ascend:
        (path,) = directory.glob("*.safetensors")
        save_file(load_file(path), path)
    return load(directory)


@pytest.mark.parametrize("names_ascend", [True, False], ids=["by expert", "by part"])
def test_experts_stored_one_by_one_lie_at_equal_distances_in_their_order(names_ascend: bool, tmp_path: Path) -> None:
    loaded = mixture_stored(names_ascend, tmp_path / "model")
    stage = next(stage for stage in loaded.shape.layers if stage.experts)
    layout = slot_layout(stage)
    placed = device_layout([stage], layout)
    for stack in stage.experts:
        for part in zip(*stack.pieces, strict=True):
            begins = [placed.tensor_offsets[piece.name] for piece in part]
            (distance,) = {after - before for before, after in pairwise(begins)}
            assert distance >= part[0].num_bytes
            stored = [layout.tensor_offsets[piece.name] for piece in part]
            assert (stored == sorted(stored)) is not names_ascend
    num_runs = 3 if names_ascend else 1  # from 0, 2 and 10 on; what is dense lies before and behind
    assert len(placed.moves) == num_runs + 2


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("tier", [Tier.cpu, Tier.nvme])
@pytest.mark.parametrize("paging", [ExpertPaging.off, ExpertPaging.hit])
def test_layers_of_misaligned_files_compute_on_a_device_as_in_memory(
    paging: ExpertPaging, tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.stream.weights.LOADING_BYTES", ALIGNMENT_BYTES)
    monkeypatch.setattr("runtime.stream.weights.HOST_PIECE_BYTES", 3 * ALIGNMENT_BYTES)
    lanes, found = lanes_of(2, 1, 5), []
    loaded = load(shift(synthesize("mixtral", tmp_path / "model"), 3))
    for device in (DEVICE, FakeDevice()):
        chosen = tier if device.is_accelerator else Tier.nvme
        with player(loaded, paging, tier=chosen, device=device) as played:
            found.append(played.logits(lanes, is_batched=False))
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)  # products of a device add up in another order
