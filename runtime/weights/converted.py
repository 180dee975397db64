"""Weights whose layout no list of byte ranges can express, converted once by transformers' own code into a file of
ours.

The file is a plain safetensors file beside which the store needs nothing special. It lives in a cache directory,
named by the
checkpoint's fingerprint, and is published whole or not at all.
"""

import logging
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from transformers import PreTrainedModel

from ..plan.shape.shapes import Parameter
from ..store.header import read_header
from ..store.writer import TensorSpec, write_safetensors
from .conversions import Conversion

log = logging.getLogger(__name__)


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
        write_safetensors(path, specs, chain.from_iterable(conversion.results(model) for conversion in conversions))
    return {name: Parameter(name=name, shape=t.shape, pieces=((t,),)) for name, t in read_header(path).items()}


def _spec(model: PreTrainedModel, conversion: Conversion, target: str) -> TensorSpec:
    return TensorSpec(name=target, dtype=conversion.dtype, shape=tuple(model.state_dict()[target].shape))
