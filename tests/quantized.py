"""Checkpoints in the formats that quantised models are published in, and what transformers makes of their values.

Each is made of a synthesised checkpoint; beside it lies a plain one with the very numbers that dequantising gives.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FP8_MAX, FP4 = 448.0, (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
KEPT = ("norm", "embed", "lm_head", "gate.weight", "router", "bias", "sinks")  # as published checkpoints have it

Tensors = dict[str, torch.Tensor]


def tensors_in(directory: Path) -> Tensors:
    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def write_checkpoint(source: Path, directory: Path, tensors: Tensors, *, num_shards: int = 1, **config: object) -> Path:
    """The files of `source` with other tensors, dealt out to the shards in turn, and changes to its config."""
    directory.mkdir(parents=True)
    for path in source.iterdir():
        if "safetensors" not in path.name:
            shutil.copy(path, directory)
    values = json.loads((source / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(values))
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {name: f"shard-{turn % num_shards}.safetensors" for turn, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file(
            {n: tensors[n] for n in tensors if weight_map[n] == file}, directory / file, metadata={"format": "pt"}
        )
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def write_fp8(source: Path, directory: Path, block: tuple[int, int], *, num_shards: int = 1) -> tuple[Path, Path]:
    """(quantised, plain): matrices of the layers in E4M3 with a factor for each block."""
    quantised: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors_in(source).items():
        if tensor.ndim != 2 or any(part in name for part in KEPT):
            quantised[name] = plain[name] = tensor
            continue
        factors = block_maxima(tensor.float(), block) / FP8_MAX
        numbers = (tensor.float() / spread(factors, block, tensor.shape)).to(torch.float8_e4m3fn)
        quantised |= {name: numbers, f"{name}_scale_inv": factors}
        plain[name] = numbers.float() * spread(factors, block, tensor.shape)
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return (
        write_checkpoint(source, directory / "fp8", quantised, num_shards=num_shards, quantization_config=method),
        write_checkpoint(source, directory / "plain", plain),
    )


def block_maxima(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows = [part.abs().amax(0) for part in matrix.split(block[0], 0)]
    return torch.stack([torch.stack([part.amax() for part in row.split(block[1])]) for row in rows])


def spread(factors: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Each factor in all the places of its block, cut off at the edges."""
    full = factors.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return full[: shape[0], : shape[1]]


def write_mxfp4(source: Path, directory: Path, *, num_shards: int = 1) -> tuple[Path, Path]:
    """(quantised, plain): gpt-oss's experts as it is published with."""
    quantised: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors_in(source).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            quantised[name] = plain[name] = tensor
            continue
        blocks, scales = to_mxfp4(tensor.float().transpose(1, 2))
        quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return (
        write_checkpoint(source, directory / "mxfp4", quantised, num_shards=num_shards, quantization_config=method),
        write_checkpoint(source, directory / "plain", plain),
    )


def to_mxfp4(experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(E, rows, K) to blocks (E, rows, K / 32, 16) and exponents (E, rows, K / 32)."""
    groups = experts.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor().sub(2).clamp(-127, 127)
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - torch.tensor(FP4)).abs().argmin(-1).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) << 3
    return (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous(), (exponents + 127).to(torch.uint8)


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """With each of these parts of a name replaced."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        for part, other in names.items():
            name = name.replace(part, other)
        result[name] = tensor
    return result
