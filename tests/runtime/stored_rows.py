"""Stored matrices of every kind that kernels of an accelerator take, on any device, and stacks of experts of them."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from runtime.formats.kinds.gguf import GgufRows
from runtime.formats.registry import pair_companions
from runtime.formats.scaled_rows import ScaledRows
from runtime.linear.packed_rows import CodedRows
from runtime.linear.rows import Rows
from runtime.linear.stored import StoredWeight
from runtime.linear.window4_rows import Window4Rows
from runtime.plan.shape.shapes import Parameter, Stage, StageKind, TensorSlice
from runtime.store.gguf import BLOCKS
from runtime.store.header import read_header
from runtime.weights.stage_weights import stage_weights
from tests.packed import packed_rows, rounded_rows, words_of
from tests.published_formats import PUBLISHED
from tests.quantized import to_mxfp4

Make = Callable[[tuple[int, int], Path, torch.device], Rows]
CPU = torch.device("cpu")


def numbers_of(rows: Rows) -> torch.Tensor:
    out = torch.empty(rows.shape, device=rows.device)
    rows.dequantize(slice(None), out)
    return out


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def published_experts(
    name: str, count: int, shape: tuple[int, int], directory: Path, device: torch.device = CPU
) -> StoredWeight:
    """Experts of a published format, side by side in one file and one item of memory."""
    tensors = {
        f"model.layers.0.experts.{turn}.up_proj.{leaf}": tensor.contiguous()
        for turn in range(count)
        for leaf, tensor in PUBLISHED[name].quantise(random(*shape, seed=turn))[0].items()
    }
    save_file(tensors, directory / "experts.safetensors")
    pieces = pair_companions(read_header(directory / "experts.safetensors"), dict(PUBLISHED[name].config))
    return in_memory([pieces[each] for each in sorted(pieces)], device)


def in_memory(pieces: list[TensorSlice], device: torch.device = CPU) -> StoredWeight:
    """The stack of pieces of one file, all of them in one item of memory, each tensor at an aligned place, as in a
    slot."""
    stored, memory, offsets = Path(pieces[0].file).read_bytes(), bytearray(), dict[str, int]()
    for part in (part for piece in pieces for part in piece.with_companions()):
        offsets[part.name] = len(memory)
        memory += stored[part.offset : part.offset + part.num_bytes]
        memory += bytes(-len(memory) % 64)
    buffer = torch.frombuffer(memory, dtype=torch.uint8).to(device)
    shape = (len(pieces), *pieces[0].shape)
    parameter = Parameter(name="w", shape=shape, pieces=tuple((piece,) for piece in pieces), is_stacked=True)
    stage = Stage(index=0, name="", kind=StageKind.layer, parameters=(parameter,))
    weight = stage_weights(stage, buffer, offsets, {"w": torch.float32}, on_device=True)["w"]
    assert isinstance(weight, StoredWeight)
    return weight


def rows_of(weight: StoredWeight) -> list[Rows]:
    """Those of each expert."""
    found = [blocks[0] for blocks in weight.entries]
    return [rows for rows in found if not isinstance(rows, torch.Tensor)]


def on_device(rows: Rows, device: torch.device) -> Rows:
    """Rows of our own formats on another device."""
    if isinstance(rows, CodedRows):
        return CodedRows(rows._body_NB.to(device), rows._scales_NG.to(device), rows._encoding)
    assert isinstance(rows, Window4Rows)
    return Window4Rows(
        rows._body_NB.to(device), [each.to(device) for each in rows._escapes], rows._num_starts, rows._first_row
    )


def _published(name: str) -> Make:
    return lambda shape, directory, device: rows_of(published_experts(name, 1, shape, directory, device))[0]


def _rounded(name: str, group_size: int = 64) -> Make:
    return lambda shape, directory, device: on_device(rounded_rows(random(*shape) * 0.02, name, group_size), device)


def _window4(shape: tuple[int, int], directory: Path, device: torch.device) -> Rows:
    numbers = random(*shape) * 0.02
    numbers[0, :5] = torch.tensor([0, -1e-20, 1e20, -torch.inf, torch.nan])
    return on_device(packed_rows(words_of(numbers.numpy()), spare_escapes=5), device)


def _fp8(dtype: torch.dtype, block: tuple[int, int], scales: torch.dtype) -> Make:
    def make(shape: tuple[int, int], directory: Path, device: torch.device) -> Rows:
        codes = torch.arange(256).repeat(-(-shape[0] * shape[1] // 256))[: shape[0] * shape[1]]
        factors = random(-(-shape[0] // block[0]), -(-shape[1] // block[1])).abs().to(scales)
        return ScaledRows(codes.to(torch.uint8).view(shape).to(device), dtype, factors.to(device), *block)

    return make


def _mxfp4(shape: tuple[int, int], directory: Path, device: torch.device) -> Rows:
    blocks, _ = to_mxfp4(random(1, *shape))
    exponents = torch.arange(shape[0] * shape[1] // 32).view(shape[0], -1) * 37 % 250
    scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu).to(device)
    return ScaledRows(blocks[0].flatten(1).to(device), None, scales, 1, 32)


def _gguf(name: str, *, is_reordered: bool = False) -> Make:
    """Random bytes; scales that are neither infinite nor NaN."""

    def make(shape: tuple[int, int], directory: Path, device: torch.device) -> Rows:
        block = BLOCKS[name]
        num_blocks = -(-shape[1] // block.num_numbers)
        bytes_NnB = torch.randint(0, 256, (shape[0], num_blocks, block.num_bytes), dtype=torch.uint8, generator=SEEDED)
        for at in SCALES_AT[name]:
            bytes_NnB[:, :, at + 1] &= 0x33  # the exponent of a float16 below its largest
        order = torch.arange(shape[0], device=device).flip(0) if is_reordered else None
        raw_NB = bytes_NnB.flatten(1).to(device)
        return GgufRows(raw_NB, name, num_blocks * block.num_numbers, order)

    return make


SEEDED = torch.Generator().manual_seed(0)
SCALES_AT = {"Q8_0": (0,), "Q4_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # of the float16 in a block
OWN: Mapping[str, Make] = {
    "int8-rows": _rounded("int8"), "fp8-rows": _rounded("fp8"),
    **{f"int4-groups of {size}": _rounded("int4", size) for size in (32, 64)},
    "window4": _window4,
}  # fmt: skip
MAKERS: Mapping[str, Make] = {
    **{name: _published(name) for name in PUBLISHED},
    "every byte of E4M3, blocks": _fp8(torch.float8_e4m3fn, (32, 50), torch.float32),
    "every byte of E5M2, blocks": _fp8(torch.float8_e5m2, (128, 128), torch.bfloat16),
    "every exponent of MXFP4": _mxfp4,
    **{f"GGUF's {name}": _gguf(name) for name in SCALES_AT},
    "GGUF's Q4_K, rows in another order": _gguf("Q4_K", is_reordered=True),
    **OWN,
}  # fmt: skip
