"""From bytes and from JSON to what is nearly that."""

import copy
import json
import random
import struct
from typing import TypeAlias

Tree: TypeAlias = "bool | int | float | str | list[Tree] | dict[str, Tree] | None"

BYTES = (0, 255, 0x7F, 0x80, *b'{}[]",:-9\n\r')
NUMBERS = (0, 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 10**9)
ODD: tuple[Tree, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**63, 2**64, 10**9, 10**30, 1.5, -0.5, 1e308, float("nan"),
    float("inf"), "", "8", "x", "x" * 1000, "../../x", "\0", "\ud800", "{{ 1/0 }}", [], {}, [[]], [1, "x"], {"a": {}},
    [None], "float16", "os.system", "kernels-community/evil",
)  # fmt: skip


def mutated(rng: random.Random, content: bytes) -> bytes:
    """A few bytes flipped, replaced, cut out, put in, or made a number that is hard to bear."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        data = data or bytearray(b"\0")
        at, size = rng.randrange(len(data)), rng.choice((1, 2, 8, 64))
        match rng.randrange(7):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice(BYTES)
            case 2:
                del data[at : at + size]
            case 3:
                data[at:at] = rng.randbytes(size)
            case 4:
                data[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case 5:
                data[at:at] = data[rng.randrange(len(data)) :][:size]
            case 6 if not rng.randrange(4):
                del data[at:]
            case _:
                data[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
    return bytes(data)


def mutated_json(rng: random.Random, content: bytes) -> bytes:
    """Values replaced, dropped, moved or wrapped somewhere in the tree; at times the text itself is mutated."""
    if not rng.randrange(8):
        return mutated(rng, content)
    tree: Tree = json.loads(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        tree = _changed(rng, tree)
    return json.dumps(tree, ensure_ascii=bool(rng.randrange(4))).encode("utf-8", "surrogatepass")


def _changed(rng: random.Random, tree: Tree) -> Tree:
    places = [place for place in _containers(tree) if place]
    if not places or not rng.randrange(40):
        return rng.choice(ODD)
    place = rng.choice(places)
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    key = rng.choice(keys)
    value = place[key]  # pyright: ignore[reportCallIssue, reportArgumentType]
    match rng.randrange(8):
        case 0:
            del place[key]  # pyright: ignore[reportCallIssue, reportArgumentType]
            return tree
        case 1:
            value = [copy.deepcopy(value)]
        case 2:
            value = {"a": copy.deepcopy(value)}
        case 3:
            value = copy.deepcopy(rng.choice(_values(tree)))
        case 4 if isinstance(value, int | float) and not isinstance(value, bool):
            value = rng.choice((-value, value * 2, value + 1, float(value), value * 10**9))
        case 5 if isinstance(place, dict):
            place[rng.choice(("auto_map", "text_config", "_attn_implementation", "x"))] = copy.deepcopy(value)
        case _:
            value = copy.deepcopy(rng.choice(ODD))
    place[key] = value  # pyright: ignore[reportCallIssue, reportArgumentType]
    return tree


def _containers(tree: Tree) -> list[list[Tree] | dict[str, Tree]]:
    containers: list[list[Tree] | dict[str, Tree]] = []
    left = [tree]
    while left:
        item = left.pop()
        if isinstance(item, dict | list):
            containers.append(item)
            left += item.values() if isinstance(item, dict) else item
    return containers


def _values(tree: Tree) -> list[Tree]:
    values: list[Tree] = [None]
    for container in _containers(tree):
        values += container.values() if isinstance(container, dict) else container
    return values
