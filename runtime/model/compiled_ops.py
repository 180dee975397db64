"""Fused operations on an accelerator, each as one kernel that `torch.compile` makes of its plain code.

A norm is seven launches there, a gate two and a rotary embedding twelve; compiled, each is one. Results differ in the
last bits of what lies between: kernels keep it in float32, where plain code rounds to the dtype of the tensors.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers.models.llama import modeling_llama as llama

from ..errors import ConfigError
from .fused import FusedOps

BACKEND = "inductor"


def require_accelerator(device: torch.device) -> None:
    """Raises ConfigError on a CPU, which has steps of its own, and where the compiler's package is missing."""
    if device.type == "cpu":
        raise ConfigError(
            "model.compile=true is for an accelerator, and this is a CPU, whose steps are compiled anyway: "
            "model.compile=false"
        )
    if device.type == "cuda" and find_spec("triton") is None:
        raise ConfigError(
            "model.compile=true needs the package triton, which torch's builds for CUDA bring along and which is not "
            "installed here: install it, or model.compile=false"
        )


def compiled_ops() -> FusedOps:
    """Returns operations of which each is one kernel. The first pass compiles: some seconds for each kind of
    operation, again where a pass has one token alone."""
    return FusedOps(
        norm=lambda x, weight, eps: _compiled(plain_norm)(x, weight, eps),
        gate=lambda gate, up: _compiled(plain_gate)(gate, up),
        gate_halves=lambda gate_up: _compiled(plain_gate)(*gate_up.chunk(2, dim=-1)),
        rotate=lambda q, k, cos, sin: _compiled(llama.apply_rotary_pos_emb)(q, k, cos, sin),
        mlp_rows=None,
    )


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True, backend=BACKEND)


def plain_norm(x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Divides (..., H) by the root of its mean square and `eps`, in float32, and multiplies it by the weight."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_H * scaled.to(x.dtype)


def plain_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up, of equal shapes."""
    return nn.functional.silu(gate) * up
