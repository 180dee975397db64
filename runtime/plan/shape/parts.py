"""A model divided among ranks, of which each computes stages that follow one another."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from ...errors import require
from .model import ModelShape
from .shapes import Stage, StageKind


def divided(stages: Sequence[Stage], count: int, *, with_tables: bool = False) -> tuple[range, ...]:
    """The stages of each of `count` ranks: whole layers, such that the heaviest rank has as few bytes as can be. The
    embeddings go with the first layer, norm and head with the last. Tables of embeddings, of which a token takes a row,
    weigh nothing in time, and with `with_tables` what they are in memory. Raises ConfigError where there are fewer
    layers than ranks."""
    layers = [stage.index for stage in stages if stage.kind is StageKind.layer]
    require(
        len(layers) >= count,
        f"devices=pipeline: {count} ranks cannot divide {len(layers)} layers: start {len(layers)} at most",
    )
    weights = [stages[index].num_bytes for index in layers]
    weights[0] += stages[0].num_bytes if with_tables else 0
    weights[-1] += stages[-1].num_bytes
    firsts = _firsts(weights, count)
    begins = [0, *(layers[first] for first in firsts[1:])]
    return tuple(range(begin, end) for begin, end in zip(begins, [*begins[1:], len(stages)], strict=True))


def _firsts(weights: Sequence[int], count: int) -> list[int]:
    """The first of each of `count` groups of neighbours, none of them empty, of which the heaviest is lightest."""
    ends = [0, *accumulate(weights)]
    best = [(float(end), [0]) for end in ends]  # of one group, by how many it holds
    for size in range(2, count + 1):
        found = best[:size]
        for end in range(size, len(ends)):
            pairs = ((max(best[cut][0], ends[end] - ends[cut]), cut) for cut in range(size - 1, end))
            heaviest, cut = min(pairs)
            found.append((heaviest, [*best[cut][1], cut]))
        best = found
    return best[-1][1]


def part_of(shape: ModelShape, part: range) -> ModelShape:
    """The model as a rank sees it that has the stages of `part` alone: others have no weights there, and keep no keys
    and values, nor states."""
    first = shape.layers[0].index
    own = [first + layer in part for layer in range(len(shape.kv_layer_bytes))]
    kv = tuple(size if is_own else 0 for size, is_own in zip(shape.kv_layer_bytes, own, strict=True))
    states = shape.state_layer_bytes or (shape.state_bytes_per_sequence,) * len(own)
    return replace(
        shape,
        stages=tuple(s if s.index in part else replace(s, parameters=(), num_experts=0) for s in shape.stages),
        kv_layer_bytes=kv,
        state_bytes_per_sequence=sum(size for size, is_own in zip(states, own, strict=True) if is_own),
        state_layer_bytes=tuple(size if is_own else 0 for size, is_own in zip(states, own, strict=True)),
        kv_tail_bytes_per_sequence=-(-shape.kv_tail_bytes_per_sequence * sum(kv) // max(1, sum(shape.kv_layer_bytes))),
        own=part,
    )
