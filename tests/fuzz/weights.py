"""Weights in fewer bytes: as others have quantised them, and as `weightstream pack` writes them."""

import json
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save

from jobs.packing.config import Format, PackConfig, SourceConfig
from jobs.packing.packing import pack
from runtime.checkpoint_source.location import read_config
from runtime.config.settings import ModelConfig, Verify
from runtime.formats.module_tensors import METHOD
from runtime.formats.registry import pair_companions
from runtime.linear.kernel_products import fits_vectors, multiply_in_vectors
from runtime.linear.window4_rows import WINDOW4
from runtime.model.loading import load_model
from runtime.plan.shape.shapes import TensorSlice
from runtime.store.checkpoint import SINGLE, open_checkpoint
from runtime.store.file_digests import METADATA, PIECE_BYTES, read_packing_record
from runtime.synthesize.checkpoints import synthesize_checkpoint
from runtime.weights.layout import pop_quantization_config
from runtime.weights.stage_weights import TORCH_DTYPES, load_tensor
from tests.fuzz.checkpoints import CONFIGS, tiny
from tests.fuzz.headers import mutated_safetensors, require_inside, safetensors
from tests.fuzz.mutate import Tree, mutated_json
from tests.fuzz.target import Files, OutsideError, Target
from tests.published_formats import PUBLISHED
from tests.quantized import block_maxima, to_mxfp4
from tests.runtime.test_published_formats import rows_of

CONFIG = CONFIGS[0]
SHAPE, NUM_MODULES = (48, 128), 3  # whole vectors; a module between the first and the last
ODD_SIZES: tuple[Tree, ...] = (0, 7, 10**12, -5, -1, 2**63, "16", 16.5, None, True, [16])
ODD_BITS: tuple[Tree, ...] = (3, 2, 8, 0, -4, 5, 64, "4", None, 4.0)
ODD_VALUES: dict[str, tuple[Tree, ...]] = {  # by a key of any depth
    "group_size": ODD_SIZES, "bits": ODD_BITS, "num_bits": ODD_BITS, "desc_act": ("yes",), "sym": (None,),
    "checkpoint_format": ("marlin", ["gptq"]), "version": ("gemv",), "type": ("float",), "symmetric": ("no",),
    "strategy": ("tensor_group", 5), "config_groups": ({}, [], {"g": None}, {"g": {"targets": "Linear"}}, 5),
    "weight_block_size": ([0, 0], [16], [16] * 3, [-1, 16], [7, 7], [10**9] * 2, "16", None, [16.0, 16], [True, 16]),
    "weights": ({}, None, 5, []), "targets": (["re:(a+)+$"], ["re:("], 5), "format": ([1], "marlin-24", 5),
}  # fmt: skip
ADDED: tuple[dict[str, Tree], ...] = (
    {"dynamic": {"-:(a+)+$": {}, "+:.*": {"bits": 8}}}, {"dynamic": {"-:(": {}}}, {"ignore": [5]}, {"ignore": ["re:("]},
    {"modules_to_not_convert": [5]}, {"zero_point": False}, {"actorder": "group"}, {"is_marlin_format": True},
    {"kv_cache_scheme": 5}, {"sparsity_config": 5}, {"sparsity_config": {"format": ["x"]}}, {"transform_config": [1]},
)  # fmt: skip
LONE: tuple[Tree, ...] = (
    {"quant_method": "modelopt"}, {"quant_method": "modelopt", "quant_algo": 5, "config_groups": []},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "xx"},
    {"load_in_8bit": True, "load_in_4bit": True}, {"quant_method": "mxfp4", "modules_to_not_convert": 7},
    {"quant_method": "weightstream", "format": "int4"}, {"quant_method": ["gptq"]}, {"quant_method": None}, [], [1], 5,
    {"quant_method": {"a": 1}}, {"quant_method": "x" * 10_000}, {"quant_method": "torchao"}, {"quant_method": "hqq"},
    {"quant_method": True}, {"quant_method": 7}, "gptq", None,
)  # fmt: skip


def seeds_of_others(home: Path) -> list[Files]:
    return [*map(_published, PUBLISHED), *_others()]


@cache
def _others() -> list[Files]:
    """Block-wise FP8 and gpt-oss's experts, which lie in other ways than matrices of linear layers."""
    matrices = {f"layers.{index}.up_proj": torch.rand(SHAPE) * 2 - 1 for index in range(NUM_MODULES)}
    fp8 = {f"{name}.weight": matrix.to(torch.float8_e4m3fn) for name, matrix in matrices.items()}
    fp8 |= {f"{name}.weight_scale_inv": block_maxima(matrix, (16, 16)) for name, matrix in matrices.items()}
    mxfp4 = dict[str, torch.Tensor]()
    for name, matrix in matrices.items():
        mxfp4[f"{name}_blocks"], mxfp4[f"{name}_scales"] = to_mxfp4(matrix[None].repeat(2, 1, 1))
    configs: list[Tree] = [{"quant_method": "fp8", "weight_block_size": [16, 16]}, {"quant_method": "mxfp4"}]
    return [{CONFIG: _config(each), SINGLE: save(of)} for each, of in zip(configs, (fp8, mxfp4), strict=True)]


@cache
def _published(name: str) -> Files:
    tensors = dict[str, torch.Tensor]()
    for index in range(NUM_MODULES):
        matrix = torch.rand(SHAPE, generator=torch.Generator().manual_seed(index)) * 2 - 1
        stored, _ = PUBLISHED[name].quantise(matrix)
        tensors |= {f"layers.{index}.up_proj.{leaf}": tensor.contiguous() for leaf, tensor in stored.items()}
    return {CONFIG: _config(dict(PUBLISHED[name].config)), SINGLE: save(tensors)}


def _config(quantization: Tree) -> bytes:
    return json.dumps(json.loads((tiny() / CONFIG).read_bytes()) | {"quantization_config": quantization}).encode()


@cache
def _right() -> dict[bytes, tuple[object, dict[str, torch.Tensor]]]:
    """What a seed's config says of zero points, and the numbers of its weights, by its file."""
    made = dict[bytes, tuple[object, dict[str, torch.Tensor]]]()
    for name, format_ in PUBLISHED.items():
        numbers = dict[str, torch.Tensor]()
        for index in range(NUM_MODULES):
            matrix = torch.rand(SHAPE, generator=torch.Generator().manual_seed(index)) * 2 - 1
            numbers[f"layers.{index}.up_proj.weight"] = format_.quantise(matrix)[1]
        made[_published(name)[SINGLE]] = _zero_points(format_.config), numbers
    return made


def _zero_points(quantization: Mapping[str, object]) -> object:
    """Nothing in a file contradicts a config that says otherwise of these."""
    return quantization.get("checkpoint_format") or "gptq"


def bad_formats(home: Path) -> list[Files]:
    """Odd values of each key that a config has, odd tensors in the place of each that there is, and odd configs."""
    files = list[Files]()
    for seed in seeds_of_others(home):
        published = json.loads(seed[CONFIG])["quantization_config"]
        files += [{**seed, CONFIG: _config(changed)} for changed in _with_odd_values(published)]
        files += [{**seed, CONFIG: _config(published | added)} for added in ADDED]
    gptq = _published("gptq")
    files += [{**gptq, CONFIG: _config(value)} for value in LONE]
    return [*files, *({**seed, SINGLE: odd} for seed in seeds_of_others(home) for odd in _odd_tensors(seed))]


def _with_odd_values(said: Tree) -> list[Tree]:
    """The tree with one value in it replaced, in each way."""
    variants = list[Tree]()
    for key, value in said.items() if isinstance(said, dict) else ():
        assert isinstance(said, dict), "it has items"
        variants += [{**said, key: other} for other in (*ODD_VALUES.get(key, ()), *_with_odd_values(value))]
    return variants


TWISTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "largest": lambda t: _bytes_as(torch.full_like(_bytes_of(t), 0xFF), t),
    "smallest": lambda t: _bytes_as(torch.full_like(_bytes_of(t), 0x80), t),
    "reversed": lambda t: _bytes_as(_bytes_of(t).flatten().flip(0), t),
    "odd numbers": lambda t: t.flatten().repeat(2)[: max(1, t.numel() - 1)].clone(),
    "none": lambda t: t.flatten()[:0],
    "stacked": lambda t: t[None],
    "transposed": lambda t: t.t().contiguous() if t.ndim == 2 else t.flatten()[:, None].repeat(1, 2),
    "twice": lambda t: torch.cat([t.flatten(), t.flatten()]),
    "float64": lambda t: t.double(),
    "int8": lambda t: torch.ones_like(t, dtype=torch.int8),
    "int64": lambda t: torch.ones_like(t, dtype=torch.int64),
}


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _bytes_as(numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return numbers.view(like.dtype).view(like.shape)


def _odd_tensors(seed: Files) -> list[bytes]:
    tensors = _tensors_of(seed[SINGLE])
    variants = list[bytes]()
    for name in (each for each in tensors if ".1." in each):  # neither the first nor the last module's
        variants.append(save({other: tensor for other, tensor in tensors.items() if other != name}))
        variants += [save(tensors | {name: twist(tensors[name].clone()).contiguous()}) for twist in TWISTS.values()]
    return variants


def _tensors_of(file: bytes) -> dict[str, torch.Tensor]:
    length = int.from_bytes(file[:8], "little")
    header, data = json.loads(file[8 : 8 + length]), bytearray(file[8 + length :])
    header.pop("__metadata__", None)
    whole = torch.frombuffer(data, dtype=torch.uint8)
    return {
        name: whole[slice(*entry["data_offsets"])].clone().view(TORCH_DTYPES[entry["dtype"]]).view(entry["shape"])
        for name, entry in header.items()
    }


def check_of_others(directory: Path, rng: random.Random) -> None:
    checkpoint = open_checkpoint(directory)
    quantization = pop_quantization_config(read_config(directory, num_tensors=len(checkpoint.tensors)))
    weights = pair_companions(checkpoint.tensors, quantization)
    require_inside(part for weight in weights.values() for part in weight.with_companions())
    zero_points, right = _right().get((directory / SINGLE).read_bytes(), (None, {}))
    for name, weight in weights.items():
        if weight.format:
            results = _by_every_way(weight)
            is_known = name in right and zero_points == _zero_points(quantization)
            if is_known and not torch.equal(results, right[name]):
                raise OutsideError(f"{name} is none of the numbers that its tensors are")


def _by_every_way(weight: TensorSlice, *, are_same: bool = True) -> torch.Tensor:
    """The numbers of a weight: whole, rows one by one, and in a product, which `are_same`."""
    loaded = load_tensor(weight)
    if not weight.format or len(weight.shape) != 2 or not all(weight.shape):
        return loaded
    rows = rows_of(weight)
    one_by_one = torch.full(loaded.shape, 7.0)
    rows.dequantize(torch.arange(weight.shape[0]), one_by_one)
    x = torch.eye(weight.shape[1])[:3]
    product = multiply_in_vectors(x, [rows]).t() if fits_vectors(x, [rows]) else loaded[:, :3]
    is_usual = loaded.isfinite().all() and loaded.abs().max() < 1e30  # no step of a product is an infinity
    if are_same and is_usual and not torch.equal(one_by_one, loaded.float()):
        raise OutsideError("rows one by one are other numbers than all of them")
    if are_same and is_usual and not torch.equal(product, loaded[:, :3].float()):
        raise OutsideError("a product is of other numbers")
    return loaded


@cache
def packed_stores(home: Path) -> list[Files]:
    """One of each format, of a model whose numbers are bfloat16."""
    source = home / "source"
    overrides = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 640}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    synthesize_checkpoint(model="llama", overrides={**overrides, **heads}, directory=source, dtype=torch.bfloat16)
    stores = list[Files]()
    for format_ in Format:
        out = home / format_.value
        pack(PackConfig(model=SourceConfig(path=str(source)), out=str(out), format=format_), lambda done, total: None)
        files_ = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in (".json", ".safetensors")}
        stores.append(files_)
    return stores


def bad_stores(home: Path) -> list[Files]:
    """What a header may say of its pieces, in odd forms, and a config that does not say that the store is one."""
    store = packed_stores(home)[0]
    length = int.from_bytes(store[SINGLE][:8], "little")
    header, data = json.loads(store[SINGLE][8 : 8 + length]), store[SINGLE][8 + length :]
    told = json.loads(header["__metadata__"][METADATA])
    odd = [5, [], {}, None, "x", *(told | {"crc32": value} for value in (5, "", [], None, "0" * 8, told["crc32"] * 2))]
    metadata = [{}, *({METADATA: json.dumps(each)} for each in odd), {METADATA: "[" * 100_000}]
    config = json.loads(store[CONFIG])
    configs = [config | {"quantization_config": value} for value in ({}, {"quant_method": "gptq"}, None)]
    return [
        *({**store, SINGLE: safetensors(header | {"__metadata__": each}, data)} for each in metadata),
        *({**store, CONFIG: json.dumps(each).encode()} for each in configs),
    ]


def mutated_store(rng: random.Random, content: bytes) -> bytes:
    """One bit, anything, or bytes whose sums were put right, as a stranger would write them."""
    match rng.randrange(4):
        case 0 | 1 as where:
            data = bytearray(content)
            data[rng.randrange((len(data), 8 + int.from_bytes(data[:8], "little"))[where])] ^= 1 << rng.randrange(8)
            return bytes(data)
        case 2:
            return mutated_safetensors(rng, content)
        case _:
            return _with_odd_bytes(rng, content)


def _with_odd_bytes(rng: random.Random, content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    name = rng.choice([name for name in header if name != "__metadata__"])
    begin, end = header[name]["data_offsets"]
    for _ in range(rng.choice((1, 4, 64))):
        at = rng.randrange(begin, end) & ~3
        data[at : at + 4] = struct.pack("<I", rng.choice((0, 2**32 - 1, 2**31, 0xFFFF, rng.getrandbits(32))))
    metadata = json.loads(header["__metadata__"][METADATA])
    pieces = (bytes(data[first : first + PIECE_BYTES]) for first in range(0, len(data), PIECE_BYTES))
    metadata["crc32"] = "".join(f"{zlib.crc32(piece):08x}" for piece in pieces)
    header["__metadata__"][METADATA] = json.dumps(metadata)
    return safetensors(header, bytes(data))


@cache
def _numbers_by_sums(home: Path) -> dict[object, dict[str, torch.Tensor]]:
    """Those of the weights of each store, by the sums of its file."""
    numbers = dict[object, dict[str, torch.Tensor]]()
    for file in (home / format_.value / SINGLE for format_ in Format):
        weights = pair_companions(open_checkpoint(file.parent).tensors, {"quant_method": METHOD})
        numbers[read_packing_record(file)[0]["crc32"]] = {name: load_tensor(weight) for name, weight in weights.items()}
    return numbers


def check_store(directory: Path, rng: random.Random) -> None:
    """A file whose sums were put right holds whatever its bytes say; any other must hold what was packed."""
    model = ModelConfig(name="hf", path=str(directory), verify=Verify.full)
    loaded = load_model(model, torch.device("cpu"), None)
    right = _numbers_by_sums(directory.parent).get(read_packing_record(directory / SINGLE)[0]["crc32"])
    for stage in loaded.shape.stages:
        for parameter in stage.parameters:
            for piece in (piece for blocks in parameter.pieces for piece in blocks):
                _by_every_way(piece, are_same=piece.format != WINDOW4 or right is not None)
                expected = (right or {}).get(parameter.name)
                if expected is not None and not torch.equal(load_tensor(piece), expected):
                    raise OutsideError(f"{parameter.name} is not what was packed")


TARGETS = (
    Target(
        name="quantised",
        seeds=seeds_of_others,
        corpus=bad_formats,
        check=check_of_others,
        how={".json": mutated_json, ".safetensors": mutated_safetensors},
    ),
    Target(
        name="packed",
        seeds=packed_stores,
        corpus=bad_stores,
        check=check_store,
        how={".json": mutated_json, ".safetensors": mutated_store},
    ),
)
