"""Headers of weights: safetensors with its index, and GGUF."""

import json
import random
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from runtime.plan.shape.shapes import TensorSlice
from runtime.store.checkpoint import INDEX, SINGLE, open_checkpoint
from tests.fuzz.mutate import mutated, mutated_json
from tests.fuzz.target import Files, OutsideError, Target

A = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
B = {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]}
HEADER: dict[str, object] = {"a": A, "b": B, "__metadata__": {"format": "pt"}}
INDEX_JSON = json.dumps({"metadata": {}, "weight_map": {"a": SINGLE, "b": SINGLE}}).encode()
HUGE = (2**31, 2**32, 2**62, 2**63, 2**64 - 1, 10**9)


def safetensors(header: object, data: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def mutated_safetensors(rng: random.Random, content: bytes) -> bytes:
    """Mostly of the header as JSON, its length put right."""
    if not rng.randrange(3):
        return mutated(rng, content)
    length = int.from_bytes(content[:8], "little")
    return safetensors(mutated_json(rng, content[8 : 8 + length]), content[8 + length :])


def bad_safetensors(home: Path) -> list[Files]:
    dims = b'{"a":{"dtype":"F32","shape":[' + b"1000000000," * 200_000 + b'1],"data_offsets":[0,4]}}'
    headers: list[object] = [
        HEADER | {"b": B | {"data_offsets": [16, 48]}}, HEADER | {"b": B | {"data_offsets": [0, 32]}},
        HEADER | {"b": B | {"data_offsets": [40, 72]}}, b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe" * 10,
        b'{"a":' + b"9" * 5000 + b"}", dims, dims.replace(b"1000000000", b"1"), b'{"a":{},"a":{}}', [], 3, {},
        HEADER | {"__metadata__": 3}, {"\ud800x": A, "b": B}, {"../../x": A, "b": B},
    ]  # fmt: skip
    headers += [
        HEADER | {"a": A | {key: odd}} for key in A for odd in (-1, 2**63, None, "8", [], {}, [2**40] * 2, [[]])
    ]
    raw = [struct.pack("<Q", length) + b"{}" for length in HUGE] + [b"", bytes(7), bytes(8)]
    maps = ["../../etc/passwd", "/etc/passwd", "..", ".", "", None, 5, "model.safetensors\0", "~", "x\ny", "a" * 300]
    indices = [{SINGLE: safetensors(HEADER), INDEX: json.dumps({"weight_map": {"a": x}}).encode()} for x in maps]
    return [*({SINGLE: safetensors(header)} for header in headers), *({SINGLE: file} for file in raw), *indices]


def check(directory: Path, rng: random.Random) -> None:
    checkpoint = open_checkpoint(directory)
    require_inside(checkpoint.tensors.values())
    checkpoint.fingerprint()


def check_gguf(directory: Path, rng: random.Random) -> None:
    check(directory / "x.gguf", rng)


def require_inside(tensors: Iterable[TensorSlice]) -> None:
    """Every byte of every tensor is in its file, and in no other tensor."""
    ends: dict[str, int] = {}
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset, tensor.num_bytes)):
        size = Path(tensor.file).stat().st_size
        if tensor.num_bytes < 0 or not ends.get(tensor.file, 0) <= tensor.offset <= size - tensor.num_bytes:
            raise OutsideError(f"{tensor.name!r} at {tensor.offset}, {tensor.num_bytes} bytes, file of {size}")
        ends[tensor.file] = tensor.offset + tensor.num_bytes


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def gguf(
    meta: Sequence[tuple[str, int, bytes]], tensors: Sequence[tuple[str, list[int], int, int]], data: bytes
) -> bytes:
    """`meta`: key, type and value; `tensors`: name, sizes, type and offset."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta))
    out += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in meta)
    for name, sizes, kind, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return out + bytes(-len(out) % 32) + data


META = [
    ("general.architecture", 8, text("llama")),
    ("general.alignment", 4, struct.pack("<I", 32)),
    ("llama.block_count", 4, struct.pack("<I", 2)),
    ("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("b") + text("c")),
    ("x.float", 6, struct.pack("<f", 1.5)),
    ("x.array", 9, struct.pack("<IQ", 4, 4) + bytes(16)),
]
TENSORS = [("token_embd.weight", [32, 8], 0, 0), ("blk.0.attn_q.weight", [32, 32], 8, 1024)]
DATA = bytes(1024 + 32 * 34)


def bad_gguf(home: Path) -> list[Files]:
    files: list[bytes] = [b"", b"GGUF", b"GGUF" + b"\xff" * 100, gguf(META * 100_000, TENSORS, DATA)]
    for kind, value in ((4, bytes(4)), (5, struct.pack("<i", -32)), (6, struct.pack("<f", float("nan"))), (7, b"\1")):
        files.append(gguf([META[0], ("general.alignment", kind, value), *META[2:]], TENSORS, DATA))
    for size in HUGE:
        files += [gguf([("x", 9, struct.pack("<IQ", kind, size))], [], b"") for kind in (0, 4, 8, 9, 10, 99)]
        files += [gguf(META, [("t", sizes, 0, 0)], DATA) for sizes in ([size], [size] * 4)]
        files += [gguf(META, [("t", [32], 0, size)], DATA)]
    files += [gguf([("x", 9, struct.pack("<IQ", 8, 4_000_000) + bytes(32_000_000))], [], b"")]
    files += [gguf([("split.count", kind, value)], [], b"") for kind, value in ((8, text("x")), (6, b"\0\0\xc0\x7f"))]
    files += [gguf(META, tensors, DATA) for tensors in (TENSORS[:1] * 2, [("t", [], 0, 0)], [("t", [32] * 5, 0, 0)])]
    files += [gguf(META, [("t", [32, 8], 0, 0), ("u", [32, 8], 0, offset)], DATA) for offset in (0, 3, 512)]
    return [{"x.gguf": content} for content in files]


TARGETS = (
    Target(
        name="safetensors",
        seeds=lambda home: [{SINGLE: safetensors(HEADER)}, {SINGLE: safetensors(HEADER), INDEX: INDEX_JSON}],
        corpus=bad_safetensors,
        check=check,
        how={".safetensors": mutated_safetensors, ".json": mutated_json},
    ),
    Target(
        name="gguf",
        seeds=lambda home: [{"x.gguf": gguf(META, TENSORS, DATA)}],
        corpus=bad_gguf,
        check=check_gguf,
    ),
)
