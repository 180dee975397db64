"""Parameters that a class computes itself, and says that it does not save, as the sinusoids of positions are."""

import re
from collections.abc import Collection

import torch
from torch import nn
from transformers import PreTrainedModel


def keep_computed(model: PreTrainedModel, names: Collection[str]) -> None:
    """Mutates `model`, which is on the meta device: those that a checkpoint, which has tensors of these `names`, leaves
    out become buffers with what the class's own initialisation gives, on the CPU."""
    patterns = model._keys_to_ignore_on_save or ()
    for name in [name for name, _ in model.named_parameters()]:
        if name not in names and any(re.search(pattern, name) for pattern in patterns):
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            module.register_buffer(leaf, _computed(model, module, leaf), persistent=False)


def _computed(model: PreTrainedModel, module: nn.Module, leaf: str) -> torch.Tensor:
    """Takes the parameter out of its module."""
    value = nn.Parameter(torch.empty_like(module.get_parameter(leaf), device="cpu"), requires_grad=False)
    module._parameters[leaf] = value
    model._init_weights(module)
    del module._parameters[leaf]
    return value.data
