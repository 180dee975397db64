"""What the engine and its streams have in common."""

from dataclasses import dataclass

from ..config import RuntimeConfig
from ..model.loading import LoadedModel
from ..plan.placement import Placement
from ..stream.device import ComputeDevice
from ..trace import Trace


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is run, by which settings, what lies where, and on which device. `trace` hears what ran when."""

    model: LoadedModel
    config: RuntimeConfig
    placement: Placement
    device: ComputeDevice
    trace: Trace | None
