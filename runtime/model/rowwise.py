"""Steps between products, each in one pass over memory: gates with SiLU, RMS norms, rotary embeddings.

transformers has their code a hundred times over, once for each family. So a module or a function is known by its code,
not by its name: what runs the same instructions as Llama's own does the same. Whatever differs stays as it is, and so
do tensors that are not float32 in a processor's memory.

Results are those of the plain code but for the last bits of float32.
T rows (tokens), H numbers of each; B sequences of T positions, h heads of D.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from ..kernels.compiler import has_compiler
from ..linear.pieces import share_groups
from ..plan.placement.memory import GATED_ROWS
from .experts import is_experts

EXPERTS: Any = MixtralExperts  # transformers' decorator adds `_apply_gate`
ROTARY = llama.apply_rotary_pos_emb.__name__


class Step(Enum):
    """What a module does by the code of Llama, or of Mixtral."""

    norm = "norm"
    gated_mlp = "gated MLP"
    rotary = "rotary"
    gate = "gate of experts"


def steps_of(model: nn.Module) -> Iterator[tuple[Any, Step]]:
    """Modules of known code, each with what it is known by."""
    for module in cast("Iterable[Any]", model.modules()):
        forward = type(module).forward
        if is_code_of(forward, llama.LlamaRMSNorm.forward):
            yield module, Step.norm
        elif is_code_of(forward, llama.LlamaMLP.forward) and _has_silu(module):
            yield module, Step.gated_mlp
        elif ROTARY in getattr(getattr(forward, "__code__", None), "co_names", ()) and _turns_like_llama(forward):
            yield module, Step.rotary
        elif _has_silu(module) and is_code_of(getattr(type(module), "_apply_gate", None), EXPERTS._apply_gate):
            yield module, Step.gate


def join_steps(model: nn.Module) -> None:
    """Mutates `model`: where there is a compiler, its modules of that code run ours when tensors allow it."""
    if has_compiler():
        replace_steps(
            model,
            {Step.norm: _norm, Step.gated_mlp: _gated_mlp, Step.rotary: _rotary, Step.gate: _apply_gate},
        )


def replace_steps(model: nn.Module, by_step: Mapping[Step, Callable[..., object]]) -> int:
    """Mutates `model`: its modules of known code run these instead; that of `Step.rotary` stands for the function of
    that name. Returns how many."""
    found = list(steps_of(model))
    for module, step in found:
        if step is Step.gate:
            module._apply_gate = MethodType(by_step[step], module)
        elif step is Step.rotary:
            module.forward = MethodType(_with_global(type(module).forward, ROTARY, by_step[step]), module)
        else:
            module.forward = MethodType(by_step[step], module)
    return len(found)


def joins_gates(layer: nn.Module) -> bool:
    """Whether its one feed-forward is ours."""
    joined = [getattr(module.forward, "__func__", None) is _gated_mlp for module in layer.modules()]
    return sum(joined) == 1 and not any(is_experts(module) for module in layer.modules())


def is_code_of(function: object, known: FunctionType | Callable[..., object]) -> bool:
    """Whether it has the same instructions on the same names and constants; what they are called with and say of
    themselves may differ."""
    own, other = (getattr(each, "__code__", None) for each in (function, known))
    return isinstance(own, CodeType) and isinstance(other, CodeType) and _body(own, function) == _body(other, known)


def _body(code: CodeType, function: object) -> tuple[object, ...]:
    constants = [each for each in code.co_consts if each is not None and each != function.__doc__]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _has_silu(module: nn.Module) -> bool:
    return isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation)


def _turns_like_llama(forward: Any) -> bool:
    turn = forward.__globals__.get(ROTARY)
    if not is_code_of(turn, llama.apply_rotary_pos_emb):
        return False
    return is_code_of(turn.__globals__.get("rotate_half"), llama.rotate_half)


def _with_global(function: Any, name: str, value: object) -> FunctionType:
    """The same function, for which a global name stands for something else."""
    other = FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    other.__kwdefaults__ = function.__kwdefaults__
    return other


@cache
def _kernel() -> ModuleType:
    """numba takes 0.2 s to import."""
    from ..kernels import rowwise

    return rowwise


def _rows_of(x: torch.Tensor) -> np.ndarray:
    """(..., H) as (T, H)."""
    return x.numpy().reshape(-1, x.shape[-1])


def _fits(*tensors: torch.Tensor) -> bool:
    """Whether kernels can read them: rows of float32 one behind the other."""
    for each in tensors:
        if type(each) not in (torch.Tensor, nn.Parameter) or each.dtype is not torch.float32 or not each.is_cpu:
            return False
        if not each.is_contiguous() or not each.numel():
            return False
    return True


def _norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if not _fits(hidden_states, self.weight) or self.weight.shape != hidden_states.shape[-1:]:
        return type(self).forward(self, hidden_states)
    return norm(hidden_states, self.weight, self.variance_epsilon)


def norm(x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """(..., H) over the root of its mean square and `eps`, times the weight. After Zhang and Sennrich, "Root Mean
    Square Layer Normalization" (2019)."""
    out, norm_rows = torch.empty_like(x), _kernel().norm_rows
    x_TH, out_TH = _rows_of(x), _rows_of(out)
    arrays = (x_TH, weight_H.detach().numpy(), np.float32(eps), out_TH)
    share_groups(x_TH, 1, lambda rows: norm_rows(*arrays, *rows))
    return out


def _gated_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    """(..., D) to (..., D), in runs of GATED_ROWS rows: what lies between gate and down is several times as wide."""
    runs = x.reshape(-1, x.shape[-1]).split(GATED_ROWS)
    outs = [self.down_proj(_gated_product(self, x_RD)) for x_RD in runs]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.view(*x.shape[:-1], out.shape[-1])


def _gated_product(mlp: Any, x_RD: torch.Tensor) -> torch.Tensor:
    """(R, H), where gates were."""
    gate, up = mlp.gate_proj(x_RD), mlp.up_proj(x_RD)
    if not _fits(gate, up):
        return mlp.act_fn(gate) * up
    return _gated(gate, up, 0, gate)


def _apply_gate(self: Any, gate_up_out: torch.Tensor) -> torch.Tensor:
    """(V, 2H) to (V, H)."""
    if gate_up_out.dim() != 2 or not _fits(gate_up_out):
        return type(self)._apply_gate(self, gate_up_out)
    num_rows, num_gates = gate_up_out.shape[0], gate_up_out.shape[1] // 2
    return _gated(gate_up_out, gate_up_out, num_gates, gate_up_out.new_empty(num_rows, num_gates))


def _gated(gate_TN: torch.Tensor, up_TN: torch.Tensor, up_begin: int, out_TH: torch.Tensor) -> torch.Tensor:
    """`out_TH`: silu(gate) * up, of H numbers from the first and from `up_begin` on. It may be `gate_TN` itself."""
    out, kernel = out_TH.numpy(), _kernel()
    arrays = (gate_TN.numpy(), up_TN.numpy(), up_begin, out)
    share_groups(out, 1, lambda rows: kernel.gate_rows(*arrays, *rows, np.empty(kernel.RUN, np.float32)))
    return out_TH


def _rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (B, h, T, D), turned by angles (B, T, D)."""
    B, _, T, D = q.shape
    rows = [each.transpose(1, 2) for each in (q, k)]  # as products leave them
    is_each_token = cos.shape == sin.shape == (k.shape[0], *k.shape[2:]) == (B, T, D)
    if unsqueeze_dim != 1 or not is_each_token or not _fits(*rows, cos, sin):
        return llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    cos_TD, sin_TD = _rows_of(cos), _rows_of(sin)
    q_BThD, k_BThD = (_turned(x_BThD, cos_TD, sin_TD) for x_BThD in rows)
    return q_BThD.transpose(1, 2), k_BThD.transpose(1, 2)


def _turned(x_BThD: torch.Tensor, cos_TD: np.ndarray, sin_TD: np.ndarray) -> torch.Tensor:
    """After Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021); pairs lie half a
    head apart."""
    out, rotate_rows = torch.empty_like(x_BThD), _kernel().rotate_rows
    x_ThD, out_ThD = (each.numpy().reshape(-1, *each.shape[2:]) for each in (x_BThD, out))
    share_groups(x_ThD, 1, lambda rows: rotate_rows(x_ThD, cos_TD, sin_TD, out_ThD, *rows))
    return out


def prepare_rows() -> None:
    """Loads, and at the first time compiles, all three, so that no pass takes their time and memory."""
    if has_compiler():
        rows_BThD = torch.ones(1, 1, 2, 2)
        norm(rows_BThD, rows_BThD[0, 0, 0], 0.0)
        _gated(rows_BThD[0, 0], rows_BThD[0, 0], 0, rows_BThD[0, 0])
        _turned(rows_BThD, rows_BThD[0, :, 0].numpy(), rows_BThD[0, :, 0].numpy())
