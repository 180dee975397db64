"""Which bytes of a GGUF file are which parameter: transformers' own names and tensor processing, tried on tags.

llama.cpp keeps some weights otherwise than transformers: rows of queries and keys interleaved, gate and up apart, norms
one too large. transformers undoes that with code that takes dequantised tensors. Here the same code is given **tags**,
small integer arrays that say of which tensor and row they are. What comes out says which rows of which tensors are a
parameter, and the weights stay as they are. Where no tag survives, because arithmetic was done or columns were moved,
the tensor is converted once (see conversions.py).
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from transformers import PreTrainedModel

from ..plan.shape.shapes import TensorSlice
from ..store.checkpoint import Checkpoint
from .gguf_processing import processing_of
from .layout import Pieces, WeightMap, make_map

log = logging.getLogger(__name__)

ROW_BITS = 40  # of a tag: the row; above them the number of the tensor


def map_gguf(model: PreTrainedModel, checkpoint: Checkpoint) -> WeightMap:
    """`model` is on the meta device. Raises CheckpointError when a parameter has no tensor or one of another shape."""
    processing = processing_of(model, checkpoint)
    tensors = list(checkpoint.tensors.values())
    state = model.state_dict()
    pieces: dict[str, Pieces] = {}
    stacked: set[str] = set()
    used: set[str] = set()
    for name, tags in processing.run({t.name: _tags(number, t) for number, t in enumerate(tensors)}).items():
        sources = _sources(tags, tensors) if name in state else []
        if sources:
            is_stack = len(sources[0].shape) == 3
            pieces[name] = _experts(sources) if is_stack else ((sources[0],),)
            stacked.update([name] if is_stack else [])
            used.update(source.name for source in sources)
    conversions = [c for c in processing.conversions if set(c.targets) <= state.keys() - pieces.keys()]
    used.update(source.name for conversion in conversions for source in conversion.sources)
    unused = checkpoint.tensors.keys() - used
    if unused:
        log.warning(
            "%s: transformers leaves out %d tensors: %s", checkpoint.path, len(unused), ", ".join(sorted(unused))
        )
    return make_map(model, pieces, stacked, conversions)


def _tags(number: int, tensor: TensorSlice) -> np.ndarray:
    """One column with a tag for each row; of a stack of matrices, a single tag."""
    tag, num_dimensions = np.int64(number) << ROW_BITS, len(tensor.shape)
    num_rows = tensor.shape[0] if num_dimensions < 3 else 1
    return (tag + np.arange(num_rows)).reshape(-1, *(1,) * (num_dimensions - 1))


def _sources(tags: np.ndarray, tensors: Sequence[TensorSlice]) -> list[TensorSlice]:
    """A tensor with its rows in order, or stacks whose matrices lie one below the other; [] where these are no tags
    any more, or not those of whole tensors."""
    if tags.dtype != np.int64:
        return []
    numbers = tags.ravel() >> ROW_BITS
    if numbers.min() < 0 or numbers.max() >= len(tensors):
        return []
    first = tensors[numbers[0]]
    if len(first.shape) == 3:
        return [tensors[number] for number in numbers]
    order = tags.ravel() - (np.int64(numbers[0]) << ROW_BITS)
    if not np.array_equal(np.sort(order), np.arange(first.shape[0])):
        return []
    is_transposed = len(first.shape) == 2 and tags.shape[0] != first.shape[0]
    runs = _runs(order.tobytes())
    storage = first.dtype if runs else first.format
    return [replace(first, format=storage, row_order=runs, is_transposed=is_transposed)]


def _experts(stacks: Sequence[TensorSlice]) -> Pieces:
    return tuple(tuple(stack.expert(index) for stack in stacks) for index in range(stacks[0].shape[0]))


@lru_cache
def _runs(order: bytes) -> tuple[range, ...]:
    """Row numbers (int64) as runs of equal steps, () for 0, 1, 2 ...; every layer has the same."""
    rows = np.frombuffer(order, dtype=np.int64).tolist()
    if rows == list(range(len(rows))):
        return ()
    runs, begin = [], 0
    while begin < len(rows):
        step = rows[begin + 1] - rows[begin] if begin + 1 < len(rows) else 1
        end = begin + 1
        while end < len(rows) and rows[end] - rows[end - 1] == step:
            end += 1
        runs.append(range(rows[begin], rows[end - 1] + (1 if step > 0 else -1), step))
        begin = end
    return tuple(runs)
