"""Which weights are multiplied as int8, where `model.products=int8` asks for it.

The matrices of layers and of experts. What chooses experts stays exact, as a choice that falls otherwise is no small
error, and so does the head.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..plan.shape.shapes import Parameter
from ..probing.layer_lists import layer_lists
from .experts import stacks
from .int8_products import fits_inputs, has_int8_unit

KEY = "model.products=int8"
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})  # what transformers calls them, and what is in them


def rounded_parameters(
    model: PreTrainedModel, parameters: Mapping[str, Parameter], dtype: torch.dtype, device: torch.device
) -> dict[str, Parameter]:
    """By name. Raises ConfigError where there are none, or no unit that is faster with them."""
    if device.type != "cpu" or dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{KEY} is for float32 on a CPU, and this is {name} on {device.type}: model.products=exact")
    if not has_int8_unit():
        raise ConfigError(
            f"{KEY}: this CPU has no matrix unit (AMX) that multiplies int8, or Linux or numba does not let us use it; "
            "without one it is no faster: model.products=exact"
        )
    found = {name: replace(parameters[name], is_int8=True) for name in _matrices(model) if _fits(parameters[name])}
    if not found:
        raise ConfigError(f"{KEY}: no layer has bfloat16 matrices of multiples of 64 inputs: model.products=exact")
    return found


def _matrices(model: PreTrainedModel) -> list[str]:
    """Those of layers that lie as (outputs, inputs)."""
    paths = [f"{found.path}." for found in layer_lists(model)]
    linear = [
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not ROUTERS & {*path.split(".")}
    ]
    stacked = [name for name in stacks(model) if not model.get_submodule(name.rpartition(".")[0]).is_transposed]
    return [name for name in (*linear, *stacked) if any(name.startswith(path) for path in paths)]


def _fits(parameter: Parameter) -> bool:
    pieces = [piece for entry in parameter.pieces for piece in entry]
    return all(piece.dtype == "BF16" and fits_inputs(piece.shape[-1]) for piece in pieces)
