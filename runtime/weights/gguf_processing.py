"""transformers' own code between a GGUF file's tensors and a model's parameters, in its two forms.

Most architectures have a `TensorProcessor`, which takes one numpy array at a time; newer ones have the converters that
safetensors have. Both belong to transformers' inner parts: nothing outside this file and conversions.py touches them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from .layout import match
from .stage_weights import load_tensor


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
