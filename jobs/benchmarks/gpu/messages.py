"""What the worker of `suite=gpu` is asked, and the lines of JSON that it answers with."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ..task import Result
from .config import GpuConfig
from .phases import PhaseTimes


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
    """The other lines. `refusal`: why there is no result; then layers and sequences are 0. `phases`: of
    Millrace's ways."""

    way: str
    num_layers: int = 0
    num_sequences: int = 0
    result: Result | None = None
    refusal: str = ""
    phases: Sequence[PhaseTimes] = field(default_factory=list)

    @staticmethod
    def parse(line: str) -> "Measurement":
        found = json.loads(line)
        phases = [PhaseTimes(**each) for each in found["phases"]]
        return Measurement(**{**found, "result": found["result"] and Result(**found["result"]), "phases": phases})


def as_line(message: GpuTask | Machine | Measurement) -> str:
    return json.dumps(asdict(message))
