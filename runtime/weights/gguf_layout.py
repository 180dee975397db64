"""Which bytes of a GGUF file are which parameter: transformers' own names and tensor processing, tried on tags.

llama.cpp keeps some weights otherwise than transformers: rows of queries and keys interleaved, gate and up apart, norms
one too large. transformers undoes that with code that takes dequantised tensors. Here the same code is given **tags**,
small integer arrays that say of which tensor and row they are. What comes out says which rows of which tensors are a
parameter, and the weights stay as they are. Where no tag survives, because arithmetic was done or columns were moved,
the tensor is converted once (see conversions.py).

transformers' own code has two forms: most architectures have a `TensorProcessor`, which takes one numpy array at a
time; newer ones have the converters that safetensors have. Both belong to transformers' inner parts: nothing outside
this file and conversions.py touches them.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from ..errors import CheckpointError
from ..plan.shape.shapes import Parameter, TensorSlice
from ..store.checkpoint import Checkpoint
from .conversions import Conversion, ConverterUse
from .layout import Pieces, make_map, match
from .stage_weights import load_tensor

log = logging.getLogger(__name__)

Processing: TypeAlias = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
ROW_BITS = 40  # of a tag: the row; above them the number of the tensor


def map_gguf(model: PreTrainedModel, checkpoint: Checkpoint) -> tuple[dict[str, Parameter], list[Conversion]]:
    """What `map_weights` gives, of a GGUF file. `model` is on the meta device. Raises CheckpointError when a parameter
    has no tensor or one of another shape."""
    run, conversions = _processing_of(model, checkpoint)
    tensors = list(checkpoint.tensors.values())
    state = model.state_dict()
    pieces: dict[str, Pieces] = {}
    stacked: set[str] = set()
    used: set[str] = set()
    for name, tags in run({t.name: _tags(number, t) for number, t in enumerate(tensors)}).items():
        sources = _sources(tags, tensors) if name in state else []
        if sources:
            is_stack = len(sources[0].shape) == 3
            experts = range(sources[0].shape[0]) if is_stack else range(0)
            pieces[name] = tuple(tuple(each.expert(index) for each in sources) for index in experts) or ((sources[0],),)
            stacked.update([name] if is_stack else [])
            used.update(source.name for source in sources)
    conversions = [c for c in conversions if set(c.targets) <= state.keys() - pieces.keys()]
    used.update(source.name for conversion in conversions for source in conversion.sources)
    unused = checkpoint.tensors.keys() - used
    if unused:
        log.warning(
            "%s: transformers leaves out %d tensors: %s", checkpoint.path, len(unused), ", ".join(sorted(unused))
        )
    return make_map(model, pieces, stacked, conversions), conversions


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


def _processing_of(model: PreTrainedModel, checkpoint: Checkpoint) -> tuple[Processing, list[Conversion]]:
    """What transformers does with the tensors of the file for this model: with arrays in the place of tensors, by
    GGUF's names, which become arrays in the place of parameters, by the model's, without those for which it wants the
    real number of columns; and with the tensors themselves, one by one. Raises CheckpointError for an architecture that
    transformers does not know."""
    assert checkpoint.gguf is not None, f"{checkpoint.path} is no GGUF file"
    architecture, tensors = checkpoint.gguf.architecture, checkpoint.tensors
    try:
        if architecture in GGUF_ARCHS:
            return _converters(model, *match(model, tensors, GGUF_ARCHS[architecture](model.config)))
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        return _processor(get_gguf_hf_weights_map(model, processor), processor, tensors)
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path}: architecture {architecture!r} cannot be read: {error}") from error


def _processor(
    names: Mapping[str, str], processor: TensorProcessor, tensors: Mapping[str, TensorSlice]
) -> tuple[Processing, list[Conversion]]:
    """`names`: GGUF's to the model's."""

    def run(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        parsed: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        results: dict[str, np.ndarray] = {}
        for name, array in arrays.items():
            try:
                done = processor.process(weights=array, name=name, tensor_key_mapping=names, parsed_parameters=parsed)
            except (ValueError, IndexError):  # it wants the real number of columns
                continue
            if done.name in names:
                results[names[done.name]] = done.weights
        return results | {name: tensor.numpy() for name, tensor in parsed["tensors"].items()}

    def converted(target: str, source: TensorSlice, model: PreTrainedModel) -> Iterator[torch.Tensor]:
        result = run({source.name: load_tensor(source).float().numpy()})[target]
        shape = model.state_dict()[target].shape
        yield torch.from_numpy(np.ascontiguousarray(result, dtype=np.float32)).view(shape)

    sources = {target: tensors[name] for name, target in names.items() if name in tensors}
    return run, [
        Conversion(targets=(target,), sources=(each,), dtype=torch.float32, results=partial(converted, target, each))
        for target, each in sources.items()
    ]


def _converters(
    model: PreTrainedModel, plain: Mapping[str, TensorSlice], uses: Sequence[ConverterUse]
) -> tuple[Processing, list[Conversion]]:
    """`plain`: tensors that are a parameter; `uses`: those that converters take."""

    def run(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = {target: arrays[tensor.name] for target, tensor in plain.items()}
        for use in uses:
            collected = {
                pattern: [torch.from_numpy(arrays[tensor.name]) for tensor in tensors]
                for pattern, tensors in use.collected.items()
            }
            try:
                done = use.convert(model, collected)
            except (ValueError, IndexError, RuntimeError):  # it wants the real number of columns
                continue
            results |= {target: done[target].numpy() for target in use.targets}
        return results

    return run, [use.conversion for use in uses]
