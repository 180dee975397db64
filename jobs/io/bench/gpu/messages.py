"""What the worker of `suite=gpu` is asked, and the lines of JSON that it answers with."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..task import Result
from .config import GpuConfig


@dataclass(frozen=True, kw_only=True)
class GpuTask:
    """`is_alone`: the one way that wants a process of its own, instead of the others."""

    gpu: GpuConfig
    prompt_tokens: int
    rounds: int
    seconds: float
    is_alone: bool = False

    @staticmethod
    def parse(line: str) -> "GpuTask":
        found = json.loads(line)
        return GpuTask(**{**found, "gpu": GpuConfig(**found["gpu"])})


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The first line. `device`: its name. Layers are those of the model."""

    device: str
    link: Mapping[str, float]  # GB/s, see link.py
    num_layers: int
    weight_bytes: int

    @staticmethod
    def parse(line: str) -> "Machine":
        return Machine(**json.loads(line))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The other lines. `refusal`: why there is no result."""

    way: str
    num_layers: int
    num_sequences: int = 0
    result: Result | None = None
    refusal: str = ""

    @staticmethod
    def parse(line: str) -> "Measurement":
        found = json.loads(line)
        return Measurement(**{**found, "result": found["result"] and Result(**found["result"])})


def as_line(message: GpuTask | Machine | Measurement) -> str:
    return json.dumps(asdict(message))
