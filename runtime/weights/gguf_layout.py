"""Maps the bytes of a GGUF file to parameters by running transformers' own tensor processing on row tags.

llama.cpp stores some weights differently from transformers: query and key rows interleaved, gate and up split, norms
increased by one. transformers reverts this on dequantized tensors. Here its code runs on **tags** instead: an integer
per row, which encodes a tensor number and a row number. The output shows which rows of which tensors form a parameter,
so weights stay quantized. If the output has other numbers than tags, or not all rows of a tensor (because the code
computes with values or moves columns), the tensor is dequantized and converted once; see conversions.py.

For most architectures transformers has a `TensorProcessor`, which works on numpy arrays; newer architectures use the
converters of safetensors. Both interfaces are private to transformers: only this file and conversions.py use them.
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
from ..store.gguf import quick_gguf_package
from .conversions import Conversion, ConverterUse
from .layout import Pieces, build_parameters, match_tensors
from .stage_weights import load_tensor

log = logging.getLogger(__name__)

Processing: TypeAlias = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]  # by GGUF name -> by parameter name
ROW_BITS = 40  # low bits of a tag: the row number; the tensor number is above them


def map_gguf(model: PreTrainedModel, checkpoint: Checkpoint) -> tuple[dict[str, Parameter], list[Conversion]]:
    """Same as `map_weights`, for a GGUF file. `model` is on the meta device. Raises CheckpointError if a parameter has
    no tensor or its shape differs."""
    run, conversions = _choose_processing(model, checkpoint)
    tensors = list(checkpoint.tensors.values())
    state = model.state_dict()
    pieces: dict[str, Pieces] = {}  # by parameter name
    stacked: set[str] = set()  # names of parameters that are stacks of experts
    used: set[str] = set()  # names of tensors
    for name, tags in run({t.name: _make_tags(number, t) for number, t in enumerate(tensors)}).items():
        sources = _sources_from_tags(tags, tensors) if name in state else []
        if sources:  # one tensor, or stacks of experts to concatenate
            is_stack = len(sources[0].shape) == 3
            experts = range(sources[0].shape[0]) if is_stack else range(0)
            pieces[name] = tuple(tuple(s.expert(index) for s in sources) for index in experts) or ((sources[0],),)
            stacked.update([name] if is_stack else [])
            used.update(source.name for source in sources)
    conversions = [c for c in conversions if set(c.targets) <= state.keys() - pieces.keys()]
    used.update(source.name for conversion in conversions for source in conversion.sources)
    unused = checkpoint.tensors.keys() - used
    if unused:
        log.warning(
            "%s: transformers does not use %d tensors: %s", checkpoint.path, len(unused), ", ".join(sorted(unused))
        )
    return build_parameters(model, pieces, stacked, conversions), conversions


def _make_tags(number: int, tensor: TensorSlice) -> np.ndarray:
    """Returns one int64 tag per row, or a single tag for a stack of matrices. All other dimensions are 1."""
    tag, num_dimensions = np.int64(number) << ROW_BITS, len(tensor.shape)
    num_rows = tensor.shape[0] if num_dimensions < 3 else 1
    return (tag + np.arange(num_rows)).reshape(-1, *(1,) * (num_dimensions - 1))


def _sources_from_tags(tags: np.ndarray, tensors: Sequence[TensorSlice]) -> list[TensorSlice]:
    """Returns the tensor whose rows the tags list, with their order; or for tags of stacks, the stacks to concatenate
    by rows. Returns [] if these numbers are not tags, or do not list all rows of a tensor."""
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
    runs = _row_runs(order.tobytes())
    storage = first.dtype if runs else first.format  # unquantized types have a format only for rows in another order
    return [replace(first, format=storage, row_order=runs, is_transposed=is_transposed)]


@lru_cache
def _row_runs(order: bytes) -> tuple[range, ...]:
    """Splits row numbers (the bytes of an int64 array) into ranges with a constant step. Returns () for 0, 1, 2 ....
    Cached, since every layer has the same order."""
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


def _choose_processing(model: PreTrainedModel, checkpoint: Checkpoint) -> tuple[Processing, list[Conversion]]:
    """Returns transformers' processing of this file in two forms: a function for tags, which omits parameters whose
    code needs the real number of columns; and conversions of the real tensors. Raises CheckpointError for an
    architecture that transformers does not support."""
    assert checkpoint.gguf is not None, f"{checkpoint.path} is not a GGUF file"
    architecture, tensors = checkpoint.gguf.architecture, checkpoint.tensors
    try:
        if architecture in GGUF_ARCHS:
            return _from_converters(model, *match_tensors(model, tensors, GGUF_ARCHS[architecture](model.config)))
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        with quick_gguf_package():
            names = get_gguf_hf_weights_map(model, processor)
        return _from_processor(names, processor, tensors)
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path}: unsupported architecture {architecture!r}: {error}") from error


def _from_processor(
    names: Mapping[str, str], processor: TensorProcessor, tensors: Mapping[str, TensorSlice]
) -> tuple[Processing, list[Conversion]]:
    """Returns the two forms of `_choose_processing` for a `TensorProcessor`. `names`: GGUF name -> parameter name."""

    def run(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        parsed: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        results: dict[str, np.ndarray] = {}
        for name, array in arrays.items():
            try:
                result = processor.process(weights=array, name=name, tensor_key_mapping=names, parsed_parameters=parsed)
            except (ValueError, IndexError):  # needs the real number of columns
                continue
            if result.name in names:
                results[names[result.name]] = result.weights
        return results | {name: tensor.numpy() for name, tensor in parsed["tensors"].items()}

    def convert(target: str, source: TensorSlice, model: PreTrainedModel) -> Iterator[torch.Tensor]:
        result = run({source.name: load_tensor(source).float().numpy()})[target]
        shape = model.state_dict()[target].shape
        yield torch.from_numpy(np.ascontiguousarray(result, dtype=np.float32)).view(shape)

    sources = {target: tensors[name] for name, target in names.items() if name in tensors}
    return run, [
        Conversion(targets=(target,), sources=(source,), dtype=torch.float32, convert=partial(convert, target, source))
        for target, source in sources.items()
    ]


def _from_converters(
    model: PreTrainedModel, plain: Mapping[str, TensorSlice], uses: Sequence[ConverterUse]
) -> tuple[Processing, list[Conversion]]:
    """Returns the two forms of `_choose_processing` for converters. `plain`: tensors that need no conversion, by
    parameter name. `uses`: tensors to convert."""

    def run(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = {target: arrays[tensor.name] for target, tensor in plain.items()}
        for use in uses:
            collected = {
                pattern: [torch.from_numpy(arrays[tensor.name]) for tensor in tensors]
                for pattern, tensors in use.collected.items()
            }
            try:
                converted = use.run_converter(model, collected)
            except (ValueError, IndexError, RuntimeError):  # needs the real number of columns
                continue
            results |= {target: converted[target].numpy() for target in use.targets}
        return results

    return run, [use.conversion for use in uses]
