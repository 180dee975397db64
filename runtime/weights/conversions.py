"""Conversions of checkpoint tensors into parameters by transformers' own code: of weights whose layout no list of byte
ranges can express, once, into a file of ours.

The file is a plain safetensors file. It lives in a cache directory, named by the checkpoint's fingerprint, and is
published whole or not at all.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from ..plan.shape.shapes import Parameter, TensorSlice
from ..store.header import read_header
from ..store.writer import TensorSpec, write_safetensors
from .stage_weights import dtype_of, load_tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What makes some parameters, `targets` by full names, of some tensors, in one dtype. `results` reads the tensors,
    converts them, and yields the targets in their order."""

    targets: tuple[str, ...]
    sources: tuple[TensorSlice, ...]
    dtype: torch.dtype
    results: Callable[[PreTrainedModel], Iterable[torch.Tensor]]


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
    def conversion(self) -> Conversion:
        def results(model: PreTrainedModel) -> Iterator[torch.Tensor]:
            loaded = {name: [load_tensor(tensor) for tensor in tensors] for name, tensors in self.collected.items()}
            results = self.convert(model, loaded)
            yield from (results[target] for target in self.targets)

        sources = tuple(tensor for tensors in self.collected.values() for tensor in tensors)
        return Conversion(targets=self.targets, sources=sources, dtype=dtype_of(sources[0]), results=results)

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


def zeroing_of(target: str, source: TensorSlice, rows: Sequence[int]) -> Conversion | None:
    """A matrix some of whose rows transformers sets to zero as it loads the class; None where the checkpoint has zeros
    there already."""
    parts = [source.rows(row, source.shape[0]) for row in rows]
    if not any(part is None or bool(load_tensor(part).any()) for part in parts):
        return None

    def results(model: PreTrainedModel) -> Iterator[torch.Tensor]:
        matrix = load_tensor(source).clone()
        matrix[list(rows)] = 0
        yield matrix

    return Conversion(targets=(target,), sources=(source,), dtype=dtype_of(source), results=results)


def specs_of(model: PreTrainedModel, conversions: Iterable[Conversion]) -> list[TensorSpec]:
    """The targets of `conversions`, as a file would hold them."""
    state = model.state_dict()
    return [
        TensorSpec(name=target, dtype=conversion.dtype, shape=tuple(state[target].shape))
        for conversion in conversions
        for target in conversion.targets
    ]


def convert_once(
    model: PreTrainedModel, conversions: Sequence[Conversion], cache: Path, fingerprint: str
) -> dict[str, Parameter]:
    """Returns the targets of `conversions` as plain parameters of the converted file, which is written if missing.

    Memory: the sources and targets of one conversion at a time (one layer's experts).
    """
    path = cache / fingerprint[:16] / "converted.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        specs = specs_of(model, conversions)
        total = sum(spec.num_bytes for spec in specs)
        log.warning("converting %d weights (%d bytes) once into %s", len(specs), total, path)
        write_safetensors(path, specs, chain.from_iterable(conversion.results(model) for conversion in conversions))
    return {name: Parameter(name=name, shape=t.shape, pieces=((t,),)) for name, t in read_header(path).items()}
