"""What the engine and its streams have in common."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..attention.page_codes import stored_dtype
from ..config.settings import RuntimeConfig
from ..model.host_ops import DTYPES
from ..model.loading import LoadedModel
from ..plan.placement.placement import Placement
from ..plan.shape.shapes import Parameter
from ..stream.device import ComputeDevice
from ..stream.fillings import Together
from ..stream.kept_weights import KeptWeights
from ..trace import Trace
from ..weights.stage_weights import TORCH_DTYPES
from .compiling import HOST_OPS, CompiledKernels, Part, prepare


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
    for part in attention_of(model):
        prepare(part)


def prepare_experts(model: LoadedModel) -> None:
    """Products with experts on the CPU beside an accelerator."""
    stacks = (parameter for stage in model.shape.stages for parameter in stage.stacks)
    prepare(products_of(stacks, model.compute_dtype))


def kernels_of(model: LoadedModel) -> CompiledKernels:
    """Loads the kernels that a model on the CPU computes with, as far as they are compiled."""
    parameters = (parameter for stage in model.shape.stages for parameter in stage.parameters)
    parts = [*attention_of(model), products_of(parameters, model.compute_dtype)]
    if model.compute_dtype in DTYPES:
        parts.append(Part(HOST_OPS, _name(model.compute_dtype)))
    return CompiledKernels(parts)


def attention_of(model: LoadedModel) -> list[Part]:
    """What attends to a model's pages on the CPU, if anything compiled does."""
    kv_dtype, computed = model.shape.kv_dtype, model.compute_dtype
    if kv_dtype.is_quantized:
        return [Part("quantized_attention", _name(computed), (kv_dtype.value,))]
    return [Part("attention", _name(stored_dtype(kv_dtype, computed)))] if model.shape.is_packed else []


def products_of(parameters: Iterable[Parameter], inputs: torch.dtype) -> Part:
    """What multiplies inputs of a dtype with these weights."""
    slices = [piece for parameter in parameters for piece in parameter.slices]
    stored = {piece.dtype for piece in slices if len(piece.shape) >= 2 and not piece.format}
    dtypes = [_name(TORCH_DTYPES[name]) for name in sorted(stored & TORCH_DTYPES.keys())]
    formats = sorted({piece.format for piece in slices if piece.format})
    return Part("products", _name(inputs), tuple(dtypes), tuple(formats))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
