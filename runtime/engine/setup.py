"""What the engine and its streams have in common."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..attention.host_attention import prepare_decode_attention
from ..attention.page_codes import stored_dtype
from ..attention.quantized_attention import prepare_decode_quantized
from ..config import RuntimeConfig
from ..linear.backends import prepare_products
from ..model.host_ops import DTYPES, prepare_host_ops
from ..model.loading import LoadedModel
from ..plan.placement.placement import Placement
from ..plan.shape.shapes import Parameter
from ..stream.device import ComputeDevice
from ..stream.fillings import Together
from ..stream.kept_weights import KeptWeights
from ..trace import Trace
from ..weights.stage_weights import TORCH_DTYPES


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is run, by which settings, what lies where, and on which device. `trace` hears what ran when, `kept` are
    weights that an earlier session has read, `together` is what ranks have in common that read weights together."""

    model: LoadedModel
    config: RuntimeConfig
    placement: Placement
    device: ComputeDevice
    trace: Trace | None
    kept: KeptWeights | None = None
    together: Together | None = None


def prepare_attention(model: LoadedModel) -> None:
    """Decode attention on the CPU, beside an accelerator too; the second time at no cost."""
    if model.shape.kv_dtype.is_quantized:
        prepare_decode_quantized(model.shape.kv_dtype, model.compute_dtype)
    elif model.shape.is_packed:
        prepare_decode_attention(stored_dtype(model.shape.kv_dtype, model.compute_dtype))


def prepare_kernels(model: LoadedModel) -> None:
    """Loads, and at the first time compiles, the kernels that a model on the CPU computes with."""
    prepare_attention(model)
    if model.compute_dtype in DTYPES:
        prepare_host_ops(model.compute_dtype)
    parameters = (parameter for stage in model.shape.stages for parameter in stage.parameters)
    _prepare_products(parameters, model.compute_dtype)


def prepare_experts(model: LoadedModel) -> None:
    """Products with experts on the CPU beside an accelerator."""
    _prepare_products((parameter for stage in model.shape.stages for parameter in stage.stacks), model.compute_dtype)


def _prepare_products(parameters: Iterable[Parameter], inputs: torch.dtype) -> None:
    slices = [piece for parameter in parameters for piece in parameter.slices]
    stored = {piece.dtype for piece in slices if len(piece.shape) >= 2 and not piece.format}
    dtypes = [TORCH_DTYPES[name] for name in sorted(stored & TORCH_DTYPES.keys())]
    prepare_products(dtypes, {piece.format for piece in slices if piece.format}, inputs)
