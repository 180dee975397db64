"""What the engine and its streams have in common."""

from dataclasses import dataclass

import torch

from ..attention.host_attention import prepare_decode_attention
from ..config import RuntimeConfig
from ..linear.backends import prepare_products
from ..model.host_ops import prepare_host_ops
from ..model.loading import LoadedModel
from ..plan.placement.placement import Placement
from ..stream.device import ComputeDevice
from ..stream.kept_weights import KeptWeights
from ..trace import Trace
from ..weights.stage_weights import TORCH_DTYPES


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is run, by which settings, what lies where, and on which device. `trace` hears what ran when, `kept` are
    weights that an earlier session has read."""

    model: LoadedModel
    config: RuntimeConfig
    placement: Placement
    device: ComputeDevice
    trace: Trace | None
    kept: KeptWeights | None = None


def prepare_attention(model: LoadedModel) -> None:
    """Decode attention on the CPU, beside an accelerator too; the second time at no cost."""
    if model.shape.is_packed:
        prepare_decode_attention(model.compute_dtype)


def prepare_kernels(model: LoadedModel) -> None:
    """Loads, and at the first time compiles, the kernels that a model on the CPU computes with."""
    prepare_attention(model)
    if model.compute_dtype == torch.float32:
        slices = [piece for stage in model.shape.stages for p in stage.parameters for piece in p.slices]
        stored = {piece.dtype for piece in slices if len(piece.shape) >= 2}
        prepare_host_ops()
        prepare_products([TORCH_DTYPES[name] for name in sorted(stored & TORCH_DTYPES.keys())])
