"""Buffers that belong to no stage: they stay with the model, so they are read once, when it is loaded."""

from collections.abc import Mapping

import torch

from ..plan.shape.shapes import Parameter
from ..weights.stage_weights import load_tensor
from .stages import StagedModel


def fill_buffers(staged: StagedModel, parameters: Mapping[str, Parameter]) -> None:
    """Gives persistent buffers outside all stages what the checkpoint holds of them; those that it lacks keep what the
    class has computed. Mutates the model. Raises OSError where a file cannot be read."""
    for name, buffer in staged.model.state_dict(keep_vars=True).items():
        if name in parameters and name not in staged.stage_of:
            path, _, leaf = name.rpartition(".")
            staged.model.get_submodule(path)._buffers[leaf] = _read(parameters[name], buffer)


def _read(parameter: Parameter, like: torch.Tensor) -> torch.Tensor:
    pieces = [load_tensor(piece) for blocks in parameter.pieces for piece in blocks]
    return torch.cat([piece.reshape(-1) for piece in pieces]).to(like.dtype).reshape(like.shape)
