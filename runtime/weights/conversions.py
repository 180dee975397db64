"""Conversions of checkpoint tensors into parameters that transformers' own code can carry out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from ..plan.shape.shapes import TensorSlice
from .stage_weights import TORCH_DTYPES, is_plain, load_tensor


class Conversion(Protocol):
    """What makes some parameters of some tensors."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Full names of the parameters."""
        ...

    @property
    def sources(self) -> tuple[TensorSlice, ...]: ...

    @property
    def dtype(self) -> torch.dtype:
        """That of the targets."""
        ...

    def results(self, model: PreTrainedModel) -> Iterator[torch.Tensor]:
        """Reads the tensors, converts them, and yields the targets in their order."""
        ...


@dataclass(frozen=True, kw_only=True)
class ConverterUse:
    """A converter with one group of targets and the checkpoint tensors that it takes, by source pattern."""

    first_target: str
    converter: WeightConverter
    collected: Mapping[str, Sequence[TensorSlice]]

    @property
    def targets(self) -> tuple[str, ...]:
        """The converter's own target patterns in the place of the one that `first_target` shows."""
        patterns = self.converter.target_patterns
        shown = next(pattern for pattern in patterns if pattern in self.first_target)
        return tuple(self.first_target.replace(shown, pattern) for pattern in patterns)

    @property
    def sources(self) -> tuple[TensorSlice, ...]:
        return tuple(tensor for tensors in self.collected.values() for tensor in tensors)

    @property
    def dtype(self) -> torch.dtype:
        source = self.sources[0]
        return TORCH_DTYPES[source.dtype] if is_plain(source) else torch.float32

    def results(self, model: PreTrainedModel) -> Iterator[torch.Tensor]:
        loaded = {name: [load_tensor(tensor) for tensor in tensors] for name, tensors in self.collected.items()}
        results = self.convert(model, loaded)
        yield from (results[target] for target in self.targets)

    def convert(self, model: PreTrainedModel, collected: Mapping[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Runs the converter on these tensors in the place of the checkpoint's."""
        template = self.converter
        converter = template.copy(
            list(template._original_source_patterns),
            list(template._original_target_patterns),
            operations=template.operations,
        )
        setattr(converter, "collected_tensors", dict(collected))  # noqa: B010 - a slot that its class does not declare
        results = converter.convert(self.first_target, model=model, config=model.config)
        return {name: result[0] if isinstance(result, list) else result for name, result in results.items()}
