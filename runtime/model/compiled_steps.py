"""Steps between products on an accelerator, each as one kernel that `torch.compile` makes of its plain code.

A norm is seven launches there, a gate two and a turn by angles twelve; compiled, each is one. Which modules are meant,
rowwise.py knows. Results differ in the last bits of what lies between: kernels keep it in float32, where plain code
rounds to the dtype of the tensors.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers.models.llama import modeling_llama as llama

from ..errors import ConfigError
from .rowwise import Step, replace_steps

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


def compile_steps(model: nn.Module) -> int:
    """Mutates `model`: its modules of known code run compiled steps from now on. Returns how many. The first pass
    compiles: some seconds for each kind of step, again where a pass has one token alone."""
    return replace_steps(
        model, {Step.norm: _norm, Step.gated_mlp: _gated_mlp, Step.rotary: _rotary, Step.gate: _apply_gate}
    )


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True, backend=BACKEND)


def _norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return _compiled(plain_norm)(hidden_states, self.weight, self.variance_epsilon)


def plain_norm(x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """(..., H) over the root of its mean square and `eps`, in float32, times the weight. After Zhang and Sennrich,
    "Root Mean Square Layer Normalization" (2019)."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_H * scaled.to(x.dtype)


def _gated_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(_compiled(plain_gate)(self.gate_proj(x), self.up_proj(x)))


def plain_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of equal shapes. After Shazeer, "GLU Variants Improve Transformer" (2020)."""
    return nn.functional.silu(gate) * up


def _apply_gate(self: Any, gate_up_out: torch.Tensor) -> torch.Tensor:
    """(V, 2H) to (V, H)."""
    return _compiled(plain_gate)(*gate_up_out.chunk(2, dim=-1))


def _rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (B, h, T, D), turned by angles (B, T, D)."""
    return _compiled(llama.apply_rotary_pos_emb)(q, k, cos, sin, unsqueeze_dim)
