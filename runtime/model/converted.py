"""Weights whose layout no list of byte ranges can express, converted once by transformers' own code into a file of
ours.

The file is a plain safetensors file beside which the store needs nothing special. It lives in a cache directory,
named by the
checkpoint's fingerprint, and is published whole or not at all.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from ..plan.shapes import Parameter, TensorSlice
from ..store.header import read_header
from ..store.writer import TensorSpec, write_safetensors
from .layout import Conversion

log = logging.getLogger(__name__)


def cache_root(configured: str | None) -> Path:
    """`offload.cache_dir`, or the user's cache directory by the XDG rules."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(configured or f"{base}/millrace").expanduser()


def convert_once(
    model: PreTrainedModel, conversions: Sequence[Conversion], cache: Path, fingerprint: str
) -> dict[str, Parameter]:
    """The targets of `conversions` as plain parameters of the converted file, which is written if it is not there yet.

    Memory: the sources and targets of one conversion at a time (one layer's experts).
    """
    path = cache / fingerprint[:16] / "converted.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        specs = [_spec(model, conversion, target) for conversion in conversions for target in conversion.targets]
        total = sum(spec.num_bytes for spec in specs)
        log.warning("converting %d weights (%d bytes) once into %s", len(specs), total, path)
        write_safetensors(path, specs, _converted(model, conversions))
    return {name: Parameter(name=name, shape=t.shape, pieces=((t,),)) for name, t in read_header(path).items()}


def _spec(model: PreTrainedModel, conversion: Conversion, target: str) -> TensorSpec:
    sources = next(iter(conversion.collected.values()))
    return TensorSpec(name=target, dtype=_load(sources[0]).dtype, shape=tuple(model.state_dict()[target].shape))


def _converted(model: PreTrainedModel, conversions: Sequence[Conversion]) -> Iterator[torch.Tensor]:
    for conversion in conversions:
        template = conversion.converter
        converter = template.copy(
            list(template._original_source_patterns),
            list(template._original_target_patterns),
            operations=template.operations,
        )
        collected = {name: [_load(tensor) for tensor in tensors] for name, tensors in conversion.collected.items()}
        setattr(converter, "collected_tensors", collected)  # noqa: B010 - a slot that its class does not declare
        results = converter.convert(conversion.first_target, model=model, config=model.config)
        for target in conversion.targets:
            result = results[target]
            yield result[0] if isinstance(result, list) else result


def _load(tensor: TensorSlice) -> torch.Tensor:
    with safe_open(tensor.file, "pt") as file:
        return file.get_tensor(tensor.name)
