"""Holds the published formats against the libraries that write them: `python -m tests.format_oracles`.

Needs compressed-tensors, bitsandbytes and gptqmodel, which no test does: each is compared bit by bit with
what is decoded here from the tensors of tests/published_formats.py, in float32, and in bfloat16 where it makes that of
FP4. Prints a line for each format; the exit code is 1
where one differs. Takes some seconds.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runtime.formats.registry import pair_companions
from runtime.store.header import read_header
from runtime.weights.stage_weights import load_tensor
from tests.published_formats import PUBLISHED, Tensors

REMOVED = "pack-quantized, ordered"  # compressed-tensors 0.20 refuses `actorder: group`, which older ones wrote


def by_compressed_tensors(tensors: Tensors, config: Mapping[str, Any]) -> torch.Tensor:
    schemes = import_module("compressed_tensors.quantization").QuantizationScheme
    compressors = import_module("compressed_tensors.compressors").BaseCompressor
    group = dict(config["config_groups"]["group_0"])
    group["weights"] = {"strategy": "group", "group_size": 32, **group["weights"]}
    if group["weights"]["strategy"] in ("channel", "tensor"):
        del group["weights"]["group_size"]
    group["weights"]["symmetric"] = "weight_zero_point" not in tensors
    wide = {"weight_scale"} if tensors["weight_scale"].dtype == torch.bfloat16 else set[str]()
    state = {leaf: tensor.float() if leaf in wide else tensor for leaf, tensor in tensors.items()}
    scheme = schemes(**group)
    return compressors.get_value_from_registry(config["format"]).decompress(state, scheme)["weight"]


def by_bitsandbytes(tensors: Tensors, config: Mapping[str, Any]) -> torch.Tensor:
    functional = import_module("bitsandbytes.functional")
    if "SCB" in tensors:
        return functional.int8_vectorwise_dequant(tensors["weight"], tensors["SCB"])
    parts = {leaf.removeprefix("weight."): tensor for leaf, tensor in tensors.items() if leaf != "weight"}
    name = next(leaf for leaf in parts if leaf.startswith("quant_state"))
    values = json.loads(bytes(parts[name].tolist())) | {"dtype": "float32"}
    parts[name] = torch.tensor([*json.dumps(values).encode()], dtype=torch.uint8)
    state = functional.QuantState.from_dict(parts, torch.device("cpu"))
    return functional.dequantize_4bit(tensors["weight"], state)


def by_gptqmodel(tensors: Tensors, config: Mapping[str, Any]) -> torch.Tensor:
    if config["quant_method"] == "awq":
        packing = import_module("gptqmodel.quantization.awq.utils.packing_utils")
        parts = tensors["qweight"], tensors["qzeros"], tensors["scales"].float()
        return packing.dequantize_gemm(*parts, 4, config["group_size"]).t()
    files = import_module("gptqmodel.utils.model_dequant")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.safetensors"
        save_file({f"a.{leaf}": tensor for leaf, tensor in tensors.items()}, path)
        if config["quant_method"] == "gptq":
            return files.convert_gptq_file(path, torch.float32, dict(config), "cpu")["a.weight"]
        with import_module("safetensors").safe_open(path, "pt") as reader:
            return files.convert_nvfp4_shard(reader, torch.float32)["a.weight"]


ORACLES = {
    "gptq": by_gptqmodel, "awq": by_gptqmodel, "compressed-tensors": by_compressed_tensors,
    "bitsandbytes": by_bitsandbytes,
}  # fmt: skip


def ours(tensors: Tensors, config: Mapping[str, Any]) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.safetensors"
        save_file({f"a.{leaf}": tensor for leaf, tensor in tensors.items()}, path)
        return load_tensor(pair_companions(read_header(path), config)["a.weight"])


def main() -> int:
    matrix, all_equal = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)), True
    for name, published in PUBLISHED.items():
        config = dict(published.config)
        oracle = ORACLES.get(str(config.get("quant_method", "bitsandbytes")))
        oracle = by_gptqmodel if name == "modelopt nvfp4" else oracle
        if oracle is None or name == REMOVED:
            print(f"{name:32} no oracle")
            continue
        tensors = {leaf: each.contiguous() for leaf, each in published.quantise(matrix)[0].items()}
        actual, expected = ours(tensors, config), oracle(tensors, config)
        is_equal = torch.equal(actual.to(expected.dtype), expected)
        all_equal &= is_equal
        verdict = "equal" if is_equal else f"differs by {(actual - expected).abs().max()}"
        print(f"{name:32} {verdict:8} {oracle.__name__}")
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
