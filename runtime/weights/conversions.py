"""Converts checkpoint tensors to parameters with transformers' own code, if a parameter's layout differs so that no
sequence of byte ranges of the checkpoint has it.

Results are written once, atomically, to a safetensors file in a cache directory named by the checkpoint's fingerprint.
Terms of transformers: a converter makes one or more parameters (targets) of tensors whose names match its patterns.
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
from .stage_weights import decoded_dtype, load_tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A conversion of checkpoint tensors to parameters."""

    targets: tuple[str, ...]  # full parameter names
    sources: tuple[TensorSlice, ...]
    dtype: torch.dtype  # of all targets
    convert: Callable[[PreTrainedModel], Iterable[torch.Tensor]]  # reads the sources, yields a tensor for each target


@dataclass(frozen=True, kw_only=True)
class ConverterUse:
    """One use of a converter, such as for the experts of one layer."""

    first_target: str  # full parameter name
    converter: WeightConverter
    collected: Mapping[str, Sequence[TensorSlice]]  # source pattern -> checkpoint tensors that match it

    @property
    def targets(self) -> tuple[str, ...]:
        """Full names of all targets: `first_target`, in which its pattern is replaced by each target pattern."""
        patterns = self.converter.target_patterns
        first_pattern = next(pattern for pattern in patterns if pattern in self.first_target)
        return tuple(self.first_target.replace(first_pattern, pattern) for pattern in patterns)

    @property
    def conversion(self) -> Conversion:
        """The conversion that runs the converter on dequantized tensors."""

        def results(model: PreTrainedModel) -> Iterator[torch.Tensor]:
            loaded = {name: [load_tensor(tensor) for tensor in tensors] for name, tensors in self.collected.items()}
            results = self.run_converter(model, loaded)
            yield from (results[target] for target in self.targets)

        sources = tuple(tensor for tensors in self.collected.values() for tensor in tensors)
        return Conversion(targets=self.targets, sources=sources, dtype=decoded_dtype(sources[0]), convert=results)

    def run_converter(
        self, model: PreTrainedModel, collected: Mapping[str, list[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Runs a copy of the converter on tensors, by source pattern. Returns the converted tensors by target name."""
        template = self.converter
        converter = template.copy(
            list(template._original_source_patterns),
            list(template._original_target_patterns),
            operations=template.operations,
        )
        setattr(converter, "collected_tensors", dict(collected))  # noqa: B010 - a slot that its class does not declare
        results = converter.convert(self.first_target, model=model, config=model.config)
        return {name: result[0] if isinstance(result, list) else result for name, result in results.items()}


def make_zeroing(target: str, source: TensorSlice, rows: Sequence[int]) -> Conversion | None:
    """Returns a conversion of `source` to parameter `target` that sets `rows` to zero, as transformers does when it
    loads this class; None if these rows are already zero in the checkpoint."""
    parts = [source.row_part(row, source.shape[0]) for row in rows]
    if not any(part is None or bool(load_tensor(part).any()) for part in parts):
        return None

    def results(model: PreTrainedModel) -> Iterator[torch.Tensor]:
        matrix = load_tensor(source).clone()
        matrix[list(rows)] = 0
        yield matrix

    return Conversion(targets=(target,), sources=(source,), dtype=decoded_dtype(source), convert=results)


def target_specs(model: PreTrainedModel, conversions: Iterable[Conversion]) -> list[TensorSpec]:
    """Returns name, dtype and shape of each target, for the file to write."""
    state = model.state_dict()
    return [
        TensorSpec(name=target, dtype=conversion.dtype, shape=tuple(state[target].shape))
        for conversion in conversions
        for target in conversion.targets
    ]


def convert_once(
    model: PreTrainedModel, conversions: Sequence[Conversion], cache: Path, fingerprint: str
) -> dict[str, Parameter]:
    """Writes the converted file if it is missing. Returns the targets of `conversions` as parameters in that file.

    Peak memory: the sources and targets of one conversion, such as the experts of one layer.
    """
    path = cache / fingerprint[:16] / "converted.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        specs = target_specs(model, conversions)
        total = sum(spec.num_bytes for spec in specs)
        log.warning("converting %d weights (%d bytes) once into %s", len(specs), total, path)
        write_safetensors(path, specs, chain.from_iterable(conversion.convert(model) for conversion in conversions))
    return {name: Parameter(name=name, shape=t.shape, pieces=((t,),)) for name, t in read_header(path).items()}
