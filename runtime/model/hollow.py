"""Copies of a model that take next to no memory, to find out what its class does: on the meta device, or with numbers
that nobody trained.
"""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from .layer_lists import layer_lists

NUM_LAYERS = 2  # of a copy with values: a matrix is copied when it is multiplied


class _NoExperts(nn.Module):
    def forward(self, hidden_states: torch.Tensor, *args: object) -> torch.Tensor:
        return torch.empty_like(hidden_states)


class Reached(Exception):
    """The forward has come to a layer that the copy does not have. `hidden` and `named` are what it was handed."""

    def __init__(self, hidden: torch.Tensor, named: dict[str, object]):
        super().__init__()
        self.hidden, self.named = hidden, named


class _End(nn.Module):
    """In the place of a layer: what the class reads off it beforehand, it reads off the original."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        raise Reached(hidden_states, kwargs)


def without_values(model: PreTrainedModel) -> PreTrainedModel:
    """On the meta device, which computes shapes alone, and without experts: they choose by values."""
    found = copy.deepcopy(model).to("meta")  # pyright: ignore[reportArgumentType] - transformers hides the signature
    _leave_out_experts(found)
    return found


def _leave_out_experts(model: PreTrainedModel) -> None:
    for name in [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"]:
        model.set_submodule(name, _NoExperts())


def with_values(model: PreTrainedModel, *, num_layers: int = NUM_LAYERS, with_experts: bool = False) -> PreTrainedModel:
    """On the CPU, its first layers alone. Element (i, j) of a matrix is number i + j of a vector, so weights take no
    memory, and no two rows or columns are equal. Running it raises `Reached` behind the last layer, if there are more.
    """
    found = copy.deepcopy(model)
    if getattr(found.config.get_text_config(), "_experts_implementation", None) is not None:
        found.set_experts_implementation("eager")  # others would copy all of a layer's experts
    for part in layer_lists(found):
        if len(part.layers) > num_layers:
            part.layers[num_layers] = _End(part.layers[num_layers])
            del part.layers[num_layers + 1 :]
    if not with_experts:
        _leave_out_experts(found)
    generator = torch.Generator().manual_seed(0)
    for module in found.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_numbers(parameter, generator), requires_grad=False)
    return found


def _numbers(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    length = sum(like.shape) - like.ndim + 1
    numbers = torch.randn(length, generator=generator).to(like.dtype)
    return torch.as_strided(numbers, like.shape, [1] * like.ndim)
