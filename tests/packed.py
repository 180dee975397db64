"""Matrices of bfloat16 for whom packing could go wrong, packed rows, and stores without the job that packs them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from jobs.packing.shard import pack_shard
from runtime.formats.kinds.rounded import Rounding
from runtime.formats.kinds.window4 import escape_words, pack_window4
from runtime.formats.module_tensors import METHOD
from runtime.linear.packed_rows import CodedRows
from runtime.linear.window4_rows import Window4Rows

Words = np.ndarray  # bits of bfloat16


def words_of(numbers: np.ndarray) -> Words:
    return torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def adversaries(shape: tuple[int, int]) -> Mapping[str, Words]:
    rng, every = np.random.default_rng(0), np.arange(1 << 16).astype(np.uint16)
    normal, alone = rng.normal(0, 0.02, shape), {"0": 0, "-0": 0x8000, "NaN": 0x7FC1, "-inf": 0xFF80, "one": 0x3F81}
    numbers = {
        "normal": normal,
        "Student's t": rng.standard_t(4, shape) * 0.02,
        "30 % zeros": normal * (rng.random(shape) >= 0.3),
        "rows of mixed scales": normal * np.exp(rng.normal(0, 1, (shape[0], 1))),
        "one row of another scale": normal * np.where(np.arange(shape[0]) == shape[0] // 2, 1e-12, 1)[:, None],
    }
    words = {name: words_of(each) for name, each in numbers.items()}
    words |= {"all patterns": np.resize(every, shape), "shuffled": np.resize(rng.permutation(every), shape)}
    words |= {name: np.full(shape, word, np.uint16) for name, word in alone.items()}
    return words | {"subnormal": rng.integers(0, 128, shape).astype(np.uint16) | np.uint16(0x8000)}


def packed_rows(words_NK: Words, spare_escapes: int = 0) -> Window4Rows:
    """`spare_escapes`: room that belongs to no row, as experts with fewer escapes than others have."""
    packed = pack_window4(words_NK)
    companion = torch.from_numpy(escape_words(packed, len(packed.columns) + spare_escapes))
    return Window4Rows(torch.from_numpy(packed.body), [companion], len(words_NK) + 1)


def rounded_rows(numbers_NK: torch.Tensor, name: str, group_size: int = 64) -> CodedRows:
    rounding = Rounding(name, group_size)
    scales_NG = rounding.choose_scales(numbers_NK)
    return CodedRows(rounding.encode(numbers_NK, scales_NG), scales_NG, rounding.encoding)


def tensor_of(words_NK: Words) -> torch.Tensor:
    return torch.from_numpy(words_NK.view(np.int16)).view(torch.bfloat16)


def write_packed(source: Path, directory: Path, rounding: Rounding | None) -> Path:
    """The store of a checkpoint of one file; None: without loss. Needs no pyarrow, as `weightstream pack` does."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    name = "model.safetensors"
    pack_shard(source / name, directory / name, "", rounding=rounding, verify=True, progress=lambda num_bytes: None)
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": METHOD}}))
    return directory
