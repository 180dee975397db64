"""Fused operations: RMS norms, SiLU gates, rotary embeddings.

On a CPU, compiled kernels read and write each number once; they support contiguous float32 and bfloat16. On an
accelerator, `torch.compile` makes one kernel of each operation. Without it, a norm takes seven launches, a gate two,
and a rotary embedding twelve. Results differ in the last bits: kernels keep intermediate results in float32, while
plain torch code rounds them to the dtype of the tensors.

Shapes: T rows (tokens) of H numbers; B sequences of T positions, h heads of D numbers; V rows of 2H numbers (gates,
then ups).
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.models.llama import modeling_llama as llama

from ..attention.host_attention import BITS
from ..errors import ConfigError
from ..kernels.compiler import can_compile, has_compiler
from ..linear.work_items import parallel_for_groups
from ..plan.placement.memory import GATED_ROWS
from .fused import FusedOps, Rotated

DTYPES = (torch.float32, torch.bfloat16)


def host_ops() -> FusedOps | None:
    """Returns the operations for a CPU; None if no compiler is available, since plain code is fastest then."""
    if not can_compile():
        return None
    return FusedOps(norm=norm, gate=gate, gate_halves=gate_halves, rotate=rotate, mlp_rows=GATED_ROWS)


def prepare_host_ops(dtype: torch.dtype = torch.float32) -> None:
    """Loads all kernels for a dtype of DTYPES, or compiles them if they are not cached, so that no pass waits for
    this."""
    if has_compiler():
        rows_BThD = torch.ones(1, 1, 2, 2, dtype=dtype)
        norm(rows_BThD, rows_BThD[0, 0, 0], 0.0)
        gate(rows_BThD[0, 0], rows_BThD[0, 0])
        rotate(rows_BThD, rows_BThD, rows_BThD[0, :, :1], rows_BThD[0, :, :1])


@cache
def _kernel() -> ModuleType:
    from ..kernels import rowwise  # on first use: numba takes 0.2 s to import

    return rowwise


def _as_numpy(x: torch.Tensor) -> np.ndarray:
    """Returns a NumPy view: float32 numbers, or the bits of bfloat16 numbers."""
    return x.detach().view(BITS[x.dtype]).numpy()


def _as_rows(x: torch.Tensor) -> np.ndarray:
    return _as_numpy(x).reshape(-1, x.shape[-1])


def _can_run(*tensors: torch.Tensor) -> bool:
    """True if compiled kernels support these tensors: contiguous float32 or bfloat16 on the CPU."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES or not has_compiler():
        return False
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.dtype is not dtype or not tensor.is_cpu:
            return False
        if not tensor.is_contiguous() or not tensor.numel():
            return False
    return True


def norm(x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor | None:
    """RMS norm: divides (..., H) by the root of its mean square plus `eps`, and multiplies by the weight."""
    if not _can_run(x, weight_H) or weight_H.shape != x.shape[-1:]:
        return None
    out, norm_rows = torch.empty_like(x), _kernel().norm_rows
    x_TH, out_TH = _as_rows(x), _as_rows(out)
    arrays = (x_TH, _as_numpy(weight_H), np.float32(eps), out_TH)
    parallel_for_groups(x_TH, 1, lambda rows: norm_rows(*arrays, *rows))
    return out


def gate(gate_TH: torch.Tensor, up_TH: torch.Tensor) -> torch.Tensor | None:
    """Returns silu(gate) * up (T, H). Overwrites `gate_TH`."""
    return _apply_gate(gate_TH, up_TH, 0, gate_TH) if _can_run(gate_TH, up_TH) else None


def gate_halves(gate_up_V2H: torch.Tensor) -> torch.Tensor | None:
    """Returns silu(gate) * up (V, H) for rows (V, 2H) whose first half is the gate and second half up."""
    if gate_up_V2H.dim() != 2 or not _can_run(gate_up_V2H):
        return None
    num_rows, num_gates = gate_up_V2H.shape[0], gate_up_V2H.shape[1] // 2
    return _apply_gate(gate_up_V2H, gate_up_V2H, num_gates, gate_up_V2H.new_empty(num_rows, num_gates))


def _apply_gate(gate_TN: torch.Tensor, up_TN: torch.Tensor, up_begin: int, out_TH: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up, written to `out_TH`, which may be `gate_TN`. gate: the first H columns of `gate_TN`. up:
    H columns of `up_TN`, from column `up_begin` on."""
    out, kernel = _as_numpy(out_TH), _kernel()
    arrays = (_as_numpy(gate_TN), _as_numpy(up_TN), up_begin, out)
    parallel_for_groups(out, 1, lambda rows: kernel.gate_rows(*arrays, *rows, np.empty(kernel.RUN, np.float32)))
    return out_TH


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Rotated | None:
    """Returns queries and keys (B, h, T, D) rotated by angles (B, T, D), as Llama does: numbers d and d + D / 2 are a
    pair."""
    B, _, T, D = q.shape
    rows = [q.transpose(1, 2), k.transpose(1, 2)]  # (B, T, h, D): contiguous, since projections return this layout
    has_angles_per_token = cos.shape == sin.shape == (k.shape[0], *k.shape[2:]) == (B, T, D)
    if not has_angles_per_token or not _can_run(*rows, cos, sin):
        return None
    cos_TD, sin_TD = _as_rows(cos), _as_rows(sin)
    rotate_rows, rotated = _kernel().rotate_rows, list[torch.Tensor]()
    for x_BThD in rows:
        rotated.append(torch.empty_like(x_BThD))
        x_ThD, out_ThD = (_as_numpy(tensor).reshape(-1, *tensor.shape[2:]) for tensor in (x_BThD, rotated[-1]))
        arrays = (x_ThD, cos_TD, sin_TD, out_ThD)
        parallel_for_groups(x_ThD, 1, lambda rows, arrays=arrays: rotate_rows(*arrays, *rows))
    return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)


BACKEND = "inductor"


def require_accelerator(device: torch.device) -> None:
    """Raises ConfigError on a CPU, which has its own kernels, and on CUDA without Triton."""
    if device.type == "cpu":
        raise ConfigError("model.compile=true is for accelerators; a CPU has its own kernels: set model.compile=false")
    if device.type == "cuda" and find_spec("triton") is None:
        raise ConfigError("model.compile=true needs the package triton: install it, or set model.compile=false")


def compiled_ops() -> FusedOps:
    """Returns the operations for an accelerator, which torch.compile turns into one kernel each. It compiles in the
    first pass, and again in the first pass with a single token: some seconds per operation."""
    return FusedOps(
        norm=lambda x, weight, eps: _compile(plain_norm)(x, weight, eps),
        gate=lambda gate, up: _compile(plain_gate)(gate, up),
        gate_halves=lambda gate_up: _compile(plain_gate)(*gate_up.chunk(2, dim=-1)),
        rotate=lambda q, k, cos, sin: _compile(llama.apply_rotary_pos_emb)(q, k, cos, sin),
        mlp_rows=None,
    )


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True, backend=BACKEND)


def plain_norm(x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm, in float32 until the result is rounded and multiplied by the weight."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_H * scaled.to(x.dtype)


def plain_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up, of equal shapes."""
    return nn.functional.silu(gate) * up
