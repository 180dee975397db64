"""Which bytes of a GGUF file are which parameter: transformers' own names and tensor processing, tried on tags.

llama.cpp keeps some weights otherwise than transformers: rows of queries and keys interleaved, gate and up apart, norms
one too large. transformers undoes that with code that takes dequantised tensors. Here the same code is given **tags**,
small integer arrays that say of which tensor and row they are. What comes out says which rows of which tensors are a
parameter, and the weights stay as they are. Where no tag survives, because arithmetic was done or columns were moved,
the tensor is converted once (see conversions.py).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from ..errors import CheckpointError
from ..plan.shape.shapes import TensorSlice
from ..store.checkpoint import Checkpoint
from .conversions import Conversion, ConverterUse
from .layout import Pieces, WeightMap, make_map, match
from .stage_weights import load_tensor

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


class Processing(Protocol):
    """What is done with the tensors of one file for one model."""

    def run(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Arrays in the place of tensors, by GGUF's names, to arrays in the place of parameters, by the model's. What
        takes only the weights themselves is left out."""
        ...

    @property
    def conversions(self) -> Sequence[Conversion]:
        """The same for the tensors themselves, one by one."""
        ...


def processing_of(model: PreTrainedModel, checkpoint: Checkpoint) -> Processing:
    """Raises CheckpointError for an architecture that transformers does not know."""
    assert checkpoint.gguf is not None, f"{checkpoint.path} is no GGUF file"
    architecture = checkpoint.gguf.architecture
    try:
        if architecture in GGUF_ARCHS:
            return _Converters(model, *match(model, checkpoint.tensors, GGUF_ARCHS[architecture](model.config)))
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        return _Processor(get_gguf_hf_weights_map(model, processor), processor, checkpoint.tensors)
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path}: architecture {architecture!r} cannot be read: {error}") from error


class _Processor:
    """`names`: GGUF's to the model's."""

    def __init__(self, names: Mapping[str, str], processor: TensorProcessor, tensors: Mapping[str, TensorSlice]):
        self.names, self._processor, self._tensors = names, processor, tensors

    def run(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        parsed: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        results: dict[str, np.ndarray] = {}
        for name, array in arrays.items():
            try:
                done = self._processor.process(
                    weights=array, name=name, tensor_key_mapping=self.names, parsed_parameters=parsed
                )
            except (ValueError, IndexError):  # it wants the real number of columns
                continue
            if done.name in self.names:
                results[self.names[done.name]] = done.weights
        return results | {name: tensor.numpy() for name, tensor in parsed["tensors"].items()}

    @property
    def conversions(self) -> Sequence[Conversion]:
        return [
            _ProcessorUse(target=target, source=self._tensors[name], processor=self)
            for name, target in self.names.items()
            if name in self._tensors
        ]


@dataclass(frozen=True, kw_only=True)
class _ProcessorUse:
    """See `conversions.Conversion`."""

    target: str
    source: TensorSlice
    processor: _Processor

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,)

    @property
    def sources(self) -> tuple[TensorSlice, ...]:
        return (self.source,)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def results(self, model: PreTrainedModel) -> Iterator[torch.Tensor]:
        weights = load_tensor(self.source).float().numpy()
        result = self.processor.run({self.source.name: weights})[self.target]
        shape = model.state_dict()[self.target].shape
        yield torch.from_numpy(np.ascontiguousarray(result, dtype=np.float32)).view(shape)


class _Converters:
    """`plain`: tensors that are a parameter; `uses`: those that converters take."""

    def __init__(self, model: PreTrainedModel, plain: Mapping[str, TensorSlice], uses: Sequence[ConverterUse]):
        self._model, self._plain, self.conversions = model, plain, uses

    def run(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = {target: arrays[tensor.name] for target, tensor in self._plain.items()}
        for use in self.conversions:
            collected = {
                pattern: [torch.from_numpy(arrays[tensor.name]) for tensor in tensors]
                for pattern, tensors in use.collected.items()
            }
            try:
                done = use.convert(self._model, collected)
            except (ValueError, IndexError, RuntimeError):  # it wants the real number of columns
                continue
            results |= {target: done[target].numpy() for target in use.targets}
        return results
