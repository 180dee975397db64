"""Makes copies of a model that take almost no memory, on the meta device or with random values, to test its class."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ConfigError
from .layer_lists import layer_lists

NUM_LAYERS = 2  # layers of a copy with random values
PROBE_ERRORS = (  # errors of classes that need real values or another cache; a test with such an error has no result
    RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ConfigError,
)  # fmt: skip
SMALL_NUMEL = 1 << 20  # matrices up to this number of elements are contiguous, in case the model's code needs that


class _NoExperts(nn.Module):
    """Replaces the experts of a layer; their output only has to differ from the input."""

    def forward(self, hidden_states: torch.Tensor, *args: object) -> torch.Tensor:
        return hidden_states / 2


class _CheapLinear(nn.Module):
    """Replaces `nn.Linear` by a cheap linear map without a matrix product: repeats the input features, or sums groups
    of them, to get the number of outputs, and scales each output by a number of `scale`. Does not use `weight`, which
    model code may read."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, num_in: int, num_out: int, scale: torch.Tensor):
        super().__init__()
        self.weight, self.bias, self.scale = weight, bias, scale
        self.in_features, self.out_features = num_in, num_out
        self.times = -(-max(num_in, num_out) // min(num_in, num_out))  # the quotient, rounded up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.out_features >= self.in_features:
            out = x.repeat(*[1] * (x.ndim - 1), self.times)[..., : self.out_features]
        else:
            padded = nn.functional.pad(x, (0, self.times * self.out_features - self.in_features))
            out = padded.unflatten(-1, (self.times, self.out_features)).sum(-2) * self.times**-0.5
        out = out.roll(1, -1) * self.scale
        return out if self.bias is None else out + self.bias


class ProbeEnded(Exception):
    """The forward reached a layer that the copy does not have. `hidden` and `arguments` (keyword arguments) are that
    layer's inputs."""

    def __init__(self, hidden: torch.Tensor, arguments: dict[str, object]):
        super().__init__()
        self.hidden, self.arguments = hidden, arguments


class _EndLayer(nn.Module):
    """Replaces the first layer that the copy does not have: its forward raises ProbeEnded. Attributes are read from the
    replaced layer."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        raise ProbeEnded(hidden_states, kwargs)


def copy_on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """A copy on the meta device, which computes shapes only. It has no experts, since routing to experts depends on
    values."""
    probe = copy.deepcopy(model).to("meta")  # pyright: ignore[reportArgumentType] - transformers hides the signature
    _remove_experts(probe)
    return probe


def _remove_experts(model: PreTrainedModel) -> None:
    for name in [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"]:
        model.set_submodule(name, _NoExperts())


def copy_with_random_values(
    model: PreTrainedModel, *, num_layers: int | None = NUM_LAYERS, with_experts: bool = False
) -> PreTrainedModel:
    """A copy of the first `num_layers` layers (None: all) on the CPU, with random weights. Running it raises
    `ProbeEnded` if the model has more layers.

    Element (i, j) of a weight matrix is element i + j of a random vector. So a weight takes almost no memory, and all
    its rows and columns differ."""
    probe = copy.deepcopy(model)
    if getattr(probe.config.get_text_config(), "_experts_implementation", None) is not None:
        probe.set_experts_implementation("eager")  # other implementations would copy all experts of a layer
    if num_layers is not None:
        for part in layer_lists(probe):
            if len(part.layers) > num_layers:
                part.layers[num_layers] = _EndLayer(part.layers[num_layers])
                del part.layers[num_layers + 1 :]
    if not with_experts:
        _remove_experts(probe)
    generator = torch.Generator().manual_seed(0)
    for module in probe.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                length = sum(parameter.shape) - parameter.ndim + 1  # the largest sum of indices, plus 1
                numbers = torch.randn(length, generator=generator).to(parameter.dtype)
                matrix = torch.as_strided(numbers, parameter.shape, [1] * parameter.ndim)
                if parameter.numel() <= SMALL_NUMEL:
                    matrix = matrix.clone(memory_format=torch.contiguous_format)
                module._parameters[name] = nn.Parameter(matrix, requires_grad=False)
    for name, module in list(probe.named_modules()):
        if type(module) is nn.Linear:
            scale = torch.randn(module.out_features, generator=generator).to(module.weight.dtype)
            sizes = (module.in_features, module.out_features, scale)
            probe.set_submodule(name, _CheapLinear(module.weight, module.bias, *sizes))
    return probe
