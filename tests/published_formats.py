"""Checkpoints as the tools of others write them, one function for each format, in the words of its definition.

Each quantiser takes a matrix (N, K) of a linear layer to its tensors, by what follows the module's name, and to the
numbers that they stand for. It rounds simply: what is tried is how numbers lie, not how well they were chosen.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.quantized import FP4, FP8_MAX, KEPT, Tensors, tensors_in, to_mxfp4, write_checkpoint

WIDTH = 32  # of groups
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # whose codes lie in a word, from its lowest bits on
NF4_MAP = (  # QLoRA's appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_MAP = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # bitsandbytes' own order, to be divided by 12
NOT_LINEAR = (*KEPT, "wte", "wpe")
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


class Affine(NamedTuple):
    """Codes (N, K) from 0 on, zero points and scales (N, G), and the numbers (code - zero) * scale."""

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    numbers: torch.Tensor


def affine(
    matrix: torch.Tensor, num_bits: int, width: int, dtype: torch.dtype, *, symmetric: bool, order: torch.Tensor | None
) -> Affine:
    """`order`: the columns in the order in which they are put into groups."""
    most, order = (1 << num_bits) - 1, torch.arange(matrix.shape[1]) if order is None else order
    groups = matrix.float()[:, order].unflatten(1, (-1, width))
    low, high = groups.amin(-1), groups.amax(-1)
    middle = 1 << (num_bits - 1)
    scales = (groups.abs().amax(-1) / (middle - 1) if symmetric else (high - low) / most).to(dtype)
    zeros = torch.full_like(low, middle) if symmetric else (-low / scales.float()).round().clamp(0, most)
    codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, most)
    numbers = ((codes - zeros[..., None]) * scales.float()[..., None]).flatten(1)
    back = order.argsort()
    return Affine(codes.flatten(1)[:, back].int(), zeros.int(), scales, numbers[:, back])


def in_words(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Codes of a row in words, the first in the lowest bits; a last word is filled up with zeros."""
    per_word = 32 // num_bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word)).unflatten(1, (-1, per_word)).long()
    return (padded << num_bits * torch.arange(per_word)).sum(-1).to(torch.int32)


def shuffled(num_columns: int) -> torch.Tensor:
    return torch.randperm(num_columns, generator=torch.Generator().manual_seed(3))


def gptq(
    matrix: torch.Tensor, *, num_bits: int = 4, symmetric: bool = True, ordered: bool = False, added: int = 1
) -> tuple[Tensors, torch.Tensor]:
    """`added`: what the format's version takes from zero points before it stores them."""
    num_columns = matrix.shape[1]
    order = shuffled(num_columns) if ordered else torch.arange(num_columns)
    stored = affine(matrix, num_bits, WIDTH, torch.float16, symmetric=symmetric, order=order)
    groups = torch.empty(num_columns, dtype=torch.int32)
    groups[order] = (torch.arange(num_columns) // WIDTH).int()
    zeros = stored.zeros - added & ((1 << num_bits) - 1)
    tensors = {
        "qweight": in_words(stored.codes, num_bits).t().contiguous(),
        "qzeros": in_words(zeros.t(), num_bits),
        "scales": stored.scales.t().contiguous(),
        "g_idx": groups,
    }
    return tensors, stored.numbers


def awq(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    stored = affine(matrix, 4, WIDTH, torch.float16, symmetric=False, order=None)

    def packed(codes: torch.Tensor) -> torch.Tensor:
        return in_words(codes.t().unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)

    tensors = {
        "qweight": packed(stored.codes),
        "qzeros": packed(stored.zeros),
        "scales": stored.scales.t().contiguous(),
    }
    return tensors, stored.numbers


def packed_integers(
    matrix: torch.Tensor, *, num_bits: int = 4, by_row: bool = False, symmetric: bool = True, ordered: bool = False
) -> tuple[Tensors, torch.Tensor]:
    num_columns = matrix.shape[1]
    order, width = shuffled(num_columns) if ordered else None, num_columns if by_row else WIDTH
    stored = affine(matrix, num_bits, width, torch.bfloat16, symmetric=symmetric, order=order)
    tensors = {
        "weight_packed": in_words(stored.codes, num_bits),
        "weight_scale": stored.scales,
        "weight_shape": torch.tensor(matrix.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = in_words(stored.zeros.t(), num_bits).t().contiguous()
    if order is not None:
        tensors["weight_g_idx"] = (order.argsort() // width).int()
    return tensors, stored.numbers


def int8(matrix: torch.Tensor, *, whole: bool = False, symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    """`whole`: one scale for all of the matrix."""
    rows = matrix.reshape(1, -1) if whole else matrix
    stored = affine(rows, 8, rows.shape[1], torch.bfloat16, symmetric=symmetric, order=None)
    tensors = {"weight": (stored.codes - 128).to(torch.int8).view(matrix.shape), "weight_scale": stored.scales}
    if not symmetric:
        tensors["weight_zero_point"] = (stored.zeros - 128).to(torch.int8)
    return tensors, stored.numbers.view(matrix.shape)


def fp8(matrix: torch.Tensor, *, whole: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensors, torch.Tensor]:
    maxima = matrix.abs().amax().view(1) if whole else matrix.abs().amax(1, keepdim=True)
    scales = (maxima.float() / FP8_MAX).to(dtype)
    numbers = (matrix.float() / scales.float()).to(torch.float8_e4m3fn)
    tensors = {"weight": numbers, "weight_scale": scales, "input_scale": torch.ones(1)}
    return tensors, numbers.float() * scales.float()


def mxfp8(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = matrix.float().unflatten(1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor().sub(8).clamp(-127, 127)
    numbers = (groups / exponents.exp2()[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    plain = (numbers.float() * exponents.exp2()[..., None]).flatten(1)
    return {"weight": numbers.flatten(1), "weight_scale": (exponents + 127).to(torch.uint8)}, plain


def mxfp4(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    blocks, scales = to_mxfp4(matrix.float()[None])
    low, high = blocks[0] & 15, blocks[0] >> 4
    numbers = fp4_numbers(torch.stack([low, high], -1).flatten(-2)) * (scales[0].float() - 127).exp2()[..., None]
    return {"weight_packed": blocks[0].flatten(1), "weight_scale": scales[0]}, numbers.flatten(1)


def fp4_numbers(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor([*FP4, *(-number for number in FP4)])[codes.int()]


def nvfp4(matrix: torch.Tensor, *, multiplied: bool = False) -> tuple[Tensors, torch.Tensor]:
    groups = matrix.float().unflatten(1, (-1, 16))
    overall = (FP8_MAX * FP4[-1] / matrix.float().abs().amax()).view(1)
    overall = 1 / overall if multiplied else overall
    maxima = groups.abs().amax(-1) / FP4[-1]
    scales = (maxima / overall if multiplied else maxima * overall).to(torch.float8_e4m3fn)
    factors = scales.float() * overall if multiplied else scales.float() / overall
    codes = ((groups / factors[..., None]).abs()[..., None] - torch.tensor(FP4)).abs().argmin(-1).to(torch.uint8)
    codes |= (groups < 0).to(torch.uint8) << 3
    numbers = (fp4_numbers(codes) * factors[..., None]).flatten(1)
    flat = codes.flatten(1)
    packed = flat[:, 0::2] | flat[:, 1::2] << 4
    if multiplied:
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": overall[0]}, numbers
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": overall}, numbers


def four_bits(matrix: torch.Tensor, *, name: str = "nf4", nested: bool = True) -> tuple[Tensors, torch.Tensor]:
    """bitsandbytes' blocks of 64 numbers, over the seams of rows."""
    code = torch.tensor(NF4_MAP if name == "nf4" else [*FP4_MAP, *(-number for number in FP4_MAP)])
    code = code / code.max()
    flat = torch.nn.functional.pad(matrix.float().flatten(), (0, -matrix.numel() % 64)).view(-1, 64)
    maxima = flat.abs().amax(1)
    state = {"quant_type": name, "blocksize": 64, "dtype": "bfloat16", "shape": list(matrix.shape)}
    tensors = {"weight.quant_map": code, "weight.absmax": maxima}
    if nested:
        maxima, found, more = nested_maxima(maxima)
        tensors, state = tensors | found, state | more
    codes = (flat / maxima[:, None].clamp(min=1e-30))[..., None].sub(code).abs().argmin(-1)
    numbers = (code[codes] * maxima[:, None]).flatten()[: matrix.numel()].view(matrix.shape)
    halves = codes.flatten()[: matrix.numel()].to(torch.uint8)
    tensors["weight"] = (halves[0::2] << 4 | halves[1::2])[:, None]
    tensors[f"weight.quant_state.bitsandbytes__{name}"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    return tensors, numbers


def nested_maxima(maxima: torch.Tensor) -> tuple[torch.Tensor, Tensors, dict[str, object]]:
    """Largest numbers as bytes: (what these stand for, their tensors, what the state says of them)."""
    offset = maxima.mean()
    centred = torch.nn.functional.pad(maxima - offset, (0, -len(maxima) % 256)).view(-1, 256)
    factors, code = centred.abs().amax(1), torch.linspace(-1, 1, 256) ** 3
    codes = (centred / factors[:, None].clamp(min=1e-30))[..., None].sub(code).abs().argmin(-1)
    numbers = (code[codes] * factors[:, None] + offset).flatten()[: len(maxima)]
    tensors = {
        "weight.absmax": codes.flatten()[: len(maxima)].to(torch.uint8),
        "weight.nested_absmax": factors,
        "weight.nested_quant_map": code,
    }
    return numbers, tensors, {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}


def llm_int8(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    maxima = matrix.float().abs().amax(1)
    codes = (matrix.float() / maxima[:, None] * 127).round().to(torch.int8)
    numbers = codes.float() * maxima[:, None] * 7.874015718698502e-3
    return {"weight": codes, "SCB": maxima, "weight_format": torch.zeros((), dtype=torch.uint8)}, numbers


@dataclass(frozen=True)
class Published:
    """A format as it is published: how a matrix is written, and what config.json says."""

    quantise: Quantise
    config: Mapping[str, Any] = field(default_factory=dict)


def _gptq(**config: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": 4, "group_size": WIDTH, "desc_act": False, "sym": True, **config}


def _compressed(name: str, activations: object = None, **weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}


def _integers(num_bits: int = 4, **weights: object) -> dict[str, object]:
    return _compressed("pack-quantized", num_bits=num_bits, type="int", symmetric=True, **weights)


PUBLISHED: dict[str, Published] = {
    "gptq": Published(gptq, _gptq(checkpoint_format="gptq")),
    "gptq, desc_act, 8 bits": Published(
        partial(gptq, num_bits=8, symmetric=False, ordered=True), _gptq(bits=8, desc_act=True, sym=False)
    ),
    "gptq_v2, zero points": Published(partial(gptq, symmetric=False, added=0), _gptq(checkpoint_format="gptq_v2")),
    "awq": Published(awq, {"quant_method": "awq", "bits": 4, "group_size": WIDTH, "version": "gemm"}),
    "pack-quantized": Published(packed_integers, _integers(group_size=WIDTH, strategy="group")),
    "pack-quantized, zero points": Published(partial(packed_integers, symmetric=False), _integers(strategy="group")),
    "pack-quantized, ordered": Published(partial(packed_integers, ordered=True), _integers(actorder="group")),
    "pack-quantized, 8 bits of rows": Published(
        partial(packed_integers, num_bits=8, by_row=True, symmetric=False), _integers(8, strategy="channel")
    ),
    "int-quantized": Published(
        int8, _compressed("int-quantized", {"num_bits": 8, "dynamic": True}, num_bits=8, strategy="channel")
    ),
    "naive-quantized, zero point": Published(
        partial(int8, whole=True, symmetric=False), _compressed("naive-quantized", num_bits=8, strategy="tensor")
    ),
    "float-quantized, tensors": Published(
        partial(fp8, whole=True), _compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
    ),
    "float-quantized, rows": Published(
        partial(fp8, whole=False), _compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    ),
    "mxfp8-quantized": Published(mxfp8, _compressed("mxfp8-quantized", num_bits=8, type="float", group_size=32)),
    "mxfp4-pack-quantized": Published(
        mxfp4, _compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32)
    ),
    "nvfp4-pack-quantized": Published(
        nvfp4, _compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16, strategy="tensor_group")
    ),
    "modelopt nvfp4": Published(
        partial(nvfp4, multiplied=True), {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    ),
    "modelopt fp8": Published(
        partial(fp8, whole=True, dtype=torch.float32), {"quant_method": "modelopt", "quant_algo": "FP8"}
    ),
    "fbgemm_fp8": Published(partial(fp8, whole=False, dtype=torch.float32), {"quant_method": "fbgemm_fp8"}),
    "bitsandbytes nf4": Published(four_bits, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes fp4": Published(partial(four_bits, name="fp4", nested=False), {"load_in_4bit": True}),
    "bitsandbytes int8": Published(llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}  # fmt: skip


def write_published(
    source: Path, directory: Path, format_: Published, *, num_shards: int = 1, transposes: bool = False
) -> tuple[Path, Path]:
    """(quantised, plain): matrices of the layers in this format. `transposes`: the class keeps them as columns, as
    GPT-2's does, the format as linear layers have them."""
    quantised: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors_in(source).items():
        if tensor.ndim != 2 or any(part in name for part in NOT_LINEAR):
            quantised[name] = plain[name] = tensor
            continue
        stored, numbers = format_.quantise(tensor.t() if transposes else tensor)
        quantised |= {name.removesuffix("weight") + leaf: each.contiguous() for leaf, each in stored.items()}
        plain[name] = (numbers.t() if transposes else numbers).contiguous()
    config = dict(format_.config)
    return (
        write_checkpoint(source, directory / "quantised", quantised, num_shards=num_shards, quantization_config=config),
        write_checkpoint(source, directory / "plain", plain),
    )
