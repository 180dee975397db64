"""Every block format becomes the numbers that gguf's own code makes of it, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from runtime.formats.kinds.gguf import DECODERS, GgufRows
from runtime.store.gguf import TYPES
from tests.gguf_files import HALVES, random_blocks

N, K = 24, 512
WRITTEN = (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1)
FOREIGN = (Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4, Type.TQ2_0)  # through gguf's numpy code


def raw(kind: Type) -> np.ndarray:
    """(N, bytes) of N rows of K numbers."""
    generator = np.random.default_rng(0)
    if kind in HALVES:
        return random_blocks((N, K), kind, 0.7, 0)
    if kind in WRITTEN:
        return gguf.quants.quantize(generator.normal(size=(N, K)).astype(np.float32), kind).view(np.uint8)
    num_numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 96, (N * K // num_numbers, num_bytes), dtype=np.uint8)
    return blocks.reshape(N, -1)


@pytest.mark.parametrize("kind", [*WRITTEN, *HALVES, *FOREIGN], ids=lambda kind: kind.name)
def test_numbers_are_those_of_gguf(kind: Type) -> None:
    stored = raw(kind)
    expected = torch.from_numpy(gguf.dequantize(stored, kind).copy())
    rows = GgufRows(torch.from_numpy(stored), kind.name, K, None)
    for choice in (slice(None), slice(5, 17), torch.tensor([23, 0, 7, 7])):
        out = torch.full((len(torch.arange(N)[choice]), K), float("nan"))
        rows.dequantize(choice, out)
        assert torch.equal(out, expected[choice])


def test_rows_come_in_their_order() -> None:
    stored, order = raw(Type.Q4_0), torch.randperm(N, generator=torch.Generator().manual_seed(1))
    expected = torch.from_numpy(gguf.dequantize(stored, Type.Q4_0))[order]
    rows, out = GgufRows(torch.from_numpy(stored), "Q4_0", K, order), torch.empty(9, K)
    rows.dequantize(slice(3, 12), out)
    assert torch.equal(out, expected[3:12])


def test_extreme_bytes_decode_like_gguf() -> None:
    """All bits set, none set: no integer overflows on its way. Scales stay finite."""
    for name in DECODERS:
        kind = Type[name]
        for byte in (0, 255):
            blocks = np.full((2, gguf.GGML_QUANT_SIZES[kind][1]), byte, dtype=np.uint8)
            halves = HALVES.get(kind, (0, 2 if name.endswith("_1") else None, 0))[:2]
            for at in halves:
                if at is not None:
                    blocks[:, at : at + 2] = np.array([0.25], dtype=np.float16).view(np.uint8)
            out = torch.empty(2, gguf.GGML_QUANT_SIZES[kind][0])
            GgufRows(torch.from_numpy(blocks), name, out.shape[1], None).dequantize(slice(None), out)
            assert torch.equal(out, torch.from_numpy(gguf.dequantize(blocks, kind))), (name, byte)


def test_block_sizes_are_those_of_gguf() -> None:
    for number, (name, block) in TYPES.items():
        assert (Type(number).name, gguf.GGML_QUANT_SIZES[Type(number)]) == (name, tuple(block))
