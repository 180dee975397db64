"""What each of several ranks that compute each token together reads, holds and is sent, beside one process.

    python -m tests.tensor_bytes [hidden=1024] [layers=8] [new_tokens=8]

prints a row for 1, 2 and 4 ranks of a Llama shape with random weights, and for experts by rows and whole of a mixture,
of half the width and half the layers.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch

from runtime import Runtime
from runtime.cache.pages import KVPages
from runtime.config.settings import DevicesConfig, DividedExperts, Parallelism
from runtime.ranks.ranks import Ranks
from runtime.ranks.tensor import SplitHeads
from runtime.units import MIB
from tests.rank_processes import in_ranks
from tests.runtime.rank_runs import completed
from tests.runtime.test_families import GREEDY, config_for
from tests.runtime.test_ranks import counted_reads
from tests.support import Reference, synthesize

TENSOR = DevicesConfig(way=Parallelism.tensor)
PROMPTS = [[7 + i, 8, 9] for i in range(6)]


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank, or one process, plans to read and to cache, what it has read, the KV heads of its pages, and what
    the others have sent it."""

    weight_bytes: int
    kv_bytes_per_token: int
    read_bytes: int
    num_kv_heads: int
    received_bytes: int


def held(ranks: Ranks, directory: Path, num_new_tokens: int, experts: DividedExperts = DividedExperts.auto) -> Held:
    ranks.devices = replace(TENSOR, experts=experts) if ranks.size > 1 else ranks.devices
    few = replace(GREEDY, max_new_tokens=num_new_tokens)
    config = config_for(Reference(directory=directory, prompts=[], expected=[], sampled=[]), sampling=few)
    runtime, shapes, layer = Runtime(config, ranks=ranks), list[torch.Size](), KVPages.layer

    def watched(pages: KVPages, index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = layer(pages, index, k, v)
        shapes.extend(each.shape for each in found)
        return found

    with counted_reads() as read, mock.patch.object(KVPages, "layer", watched):
        completed(runtime, PROMPTS)
    [num_kv_heads] = {shape[2] for shape in shapes}
    heads = runtime.model.split_heads
    return Held(
        weight_bytes=runtime.model.shape.weight_bytes,
        kv_bytes_per_token=runtime.model.shape.kv_bytes_per_token,
        read_bytes=read.num_bytes,
        num_kv_heads=num_kv_heads,
        received_bytes=heads.all_gather.received_bytes if isinstance(heads, SplitHeads) else 0,
    )


def held_each(ranks: Ranks, directories: Sequence[Path], num_new_tokens: int, experts: DividedExperts) -> list[Held]:
    return [held(ranks, directory, num_new_tokens, experts) for directory in directories]


def show(name: str, directory: Path, num_new_tokens: int, experts: DividedExperts, sizes: Sequence[int]) -> None:
    num_tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (num_new_tokens - 1)
    for size in sizes:
        each = in_ranks(size, held, directory, num_new_tokens, experts)
        weights, read = ("/".join(f"{value / MIB:.1f}" for value in sorted({*values})) for values in _bytes(each))
        received = sum(one.received_bytes for one in each) / size / num_tokens
        kv = each[0].kv_bytes_per_token
        print(f"{name} | {size} | {weights} | {read} | {kv:,} | {received:,.0f}", flush=True)


def _bytes(each: Sequence[Held]) -> tuple[list[int], list[int]]:
    return [one.weight_bytes for one in each], [one.read_bytes for one in each]


def main(words: Sequence[str]) -> None:
    options = {name: int(value) for name, _, value in (word.partition("=") for word in words)}
    hidden, num_layers, num_new = options.get("hidden", 1024), options.get("layers", 8), options.get("new_tokens", 8)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": num_layers}
    mixed = {"hidden_size": hidden // 2, "intermediate_size": hidden, "num_hidden_layers": num_layers // 2}
    print("shape | ranks | weights, MiB | read, MiB | KV, B a token | received, B a token, in the mean of ranks")
    with tempfile.TemporaryDirectory() as home:
        around = {"num_key_value_heads": 4, "vocab_size": 4096}
        dense = synthesize("llama", Path(home) / "wide", **sizes, **around)
        mixture = synthesize("mixtral", Path(home) / "mixture", **mixed, **around, num_local_experts=8)
        show("llama", dense, num_new, DividedExperts.auto, (1, 2, 4))
        show("mixture", mixture, num_new, DividedExperts.auto, (1,))
        for experts in (DividedExperts.rows, DividedExperts.whole):
            show(f"mixture, {experts.value}", mixture, num_new, experts, (2, 4))


if __name__ == "__main__":
    main(sys.argv[1:])
