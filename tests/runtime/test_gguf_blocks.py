"""Every block format becomes the numbers that gguf's own code makes of it, bit for bit."""

from itertools import product

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from runtime.config.profiles import LinearBackend
from runtime.formats.kinds.gguf import DECODERS, GgufRows, gguf_rows
from runtime.kernels.compiler import has_bf16_pairs, has_compiler
from runtime.linear.backends import BACKENDS
from runtime.linear.rows import KernelRows
from runtime.store.gguf import TYPES
from tests.gguf_files import HALVES, random_blocks

N, K = 24, 512
WRITTEN = (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1)
COMPILED = pytest.mark.skipif(not has_compiler(), reason="no compiler for kernels")
PAIRED = pytest.mark.skipif(not has_bf16_pairs(), reason="these vectors do not multiply bfloat16 by pairs")
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
    for make in (GgufRows, gguf_rows):
        rows = make(torch.from_numpy(stored), kind.name, K, None)
        for choice in (slice(None), slice(5, 17), torch.tensor([23, 0, 7, 7])):
            out = torch.full((len(torch.arange(N)[choice]), K), float("nan"))
            rows.dequantize(choice, out)
            assert torch.equal(out, expected[choice])


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param(LinearBackend.vectors, torch.float32, marks=COMPILED),
        pytest.param(LinearBackend.widened, torch.bfloat16, marks=COMPILED),
        pytest.param(LinearBackend.pairs, torch.bfloat16, marks=PAIRED),
    ],
)
@pytest.mark.parametrize("name", DECODERS)
def test_kernels_decode_blocks_inside_a_product(name: str, backend: LinearBackend, dtype: torch.dtype) -> None:
    """At all column offsets at which a kernel begins, with rows in an order of their own. Weights in pairs of bfloat16
    are rounded, as torch would round them."""
    num_rows, width = (104 if dtype == torch.float32 else 96), 1280  # torch rounds the last 8 rows to 16 bits first
    some = raw(Type[name])
    stored = torch.from_numpy(np.tile(some, (5, 3))[:num_rows, : some.shape[1] * width // K].copy())
    generator = torch.Generator().manual_seed(2)
    for order in (None, torch.randperm(num_rows, generator=generator)):
        rows, plain = gguf_rows(stored, name, width, order), GgufRows(stored, name, width, order)
        assert isinstance(rows, KernelRows)
        weights = torch.empty(num_rows, width)
        plain.dequantize(slice(None), weights)
        if backend is LinearBackend.pairs:
            weights = weights.to(dtype)
        for count in (1, 7, 65):
            x = torch.randn(count, width, generator=generator).to(dtype)
            expected = (x.double() @ weights.double().t()).to(dtype)
            rtol, atol = 1e-5 if dtype == torch.float32 else 0.01, 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(BACKENDS[backend](x, [rows]), expected, rtol=rtol, atol=atol)


def test_rows_that_no_kernel_fits_are_decoded_by_torch() -> None:
    assert not isinstance(gguf_rows(torch.zeros(8, 34, dtype=torch.uint8), "Q8_0", 32, None), KernelRows)
    assert not isinstance(gguf_rows(torch.zeros(8, 18, dtype=torch.uint8, device="meta"), "Q4_0", 32, None), KernelRows)
    assert not isinstance(gguf_rows(torch.from_numpy(raw(Type.IQ4_NL)), "IQ4_NL", K, None), KernelRows)


def test_rows_come_in_their_order() -> None:
    stored, order = raw(Type.Q4_0), torch.randperm(N, generator=torch.Generator().manual_seed(1))
    expected = torch.from_numpy(gguf.dequantize(stored, Type.Q4_0))[order]
    for make in (GgufRows, gguf_rows):
        rows, out = make(torch.from_numpy(stored), "Q4_0", K, order), torch.empty(9, K)
        rows.dequantize(slice(3, 12), out)
        assert torch.equal(out, expected[3:12])


def test_extreme_bytes_decode_like_gguf() -> None:
    """All bits set, none set: no integer overflows on its way. Scales: usual, subnormal, and of a damaged file."""
    for name in DECODERS:
        kind = Type[name]
        num_numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        for byte, scale in product((0, 255), (0.25, -6e-8, float("inf"), float("nan"))):
            blocks = np.full((2, 2, num_bytes), byte, dtype=np.uint8)
            halves = HALVES.get(kind, (0, 2 if name.endswith("_1") else None, 0))[:2]
            for at in halves:
                if at is not None:
                    blocks[:, :, at : at + 2] = np.array([scale], dtype=np.float16).view(np.uint8)
            stored = blocks.reshape(2, -1)
            with np.errstate(invalid="ignore"):
                expected = torch.from_numpy(gguf.dequantize(stored, kind))
            for make in (GgufRows, gguf_rows):
                out = torch.empty(2, 2 * num_numbers)
                make(torch.from_numpy(stored), name, out.shape[1], None).dequantize(slice(None), out)
                torch.testing.assert_close(
                    out, expected, rtol=0, atol=0, equal_nan=True, msg=f"{name}, {byte}, {scale}"
                )


def test_block_sizes_are_those_of_gguf() -> None:
    for number, (name, block) in TYPES.items():
        assert (Type(number).name, gguf.GGML_QUANT_SIZES[Type(number)]) == (name, tuple(block))
