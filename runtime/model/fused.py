"""Replaces transformers modules by fused ones: RMS norms, gated feed-forwards, attention with rotary embeddings, and
gates of experts.

A module is replaced if its forward has the same bytecode, names and constants as one of the known classes of Llama,
Mistral, Mixtral, Qwen2 or Qwen3 below, and so have the functions that it calls. Activations must be SiLU. A replacement
has the original's parameters and children under the same names. Results differ in the last bits of float32.

Shapes: T tokens of H numbers; V visits of experts; B sequences of T positions, h heads of D numbers; R rows at a time.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

EXPERTS: Any = MixtralExperts  # transformers' decorator adds `_apply_gate`
SILU = nn.SiLU | SiLUActivation
Rotated = tuple[torch.Tensor, torch.Tensor]  # queries, keys


@dataclass(frozen=True, kw_only=True)
class FusedOps:
    """The operations that replacements call. An operation returns None for unsupported tensors; the replacement then
    runs transformers' code. `mlp_rows`: rows that a feed-forward computes at a time; None: all."""

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor | None]  # x (..., H), weight (H), eps -> (..., H)
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]  # silu(gate) * up, possibly in place of gate
    gate_halves: Callable[[torch.Tensor], torch.Tensor | None]  # (V, 2H) -> (V, H): silu(first half) * second half
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Rotated | None]  # q, k, cos, sin -> q, k
    mlp_rows: int | None

    def make_replacement(self, parent: nn.Module, name: str, child: nn.Module) -> nn.Module | None:
        """Returns the replacement for `child`, which `parent` has under `name`; None if its code is not known."""
        forward = type(child).forward
        if has_same_code(forward, llama.LlamaRMSNorm.forward):
            return FusedRMSNorm(child, self)
        if has_same_code(forward, llama.LlamaMLP.forward) and isinstance(getattr(child, "act_fn", None), SILU):
            return FusedGatedMLP(child, self)
        if name == "act_fn" and isinstance(child, SILU):
            is_known = has_same_code(getattr(type(parent), "_apply_gate", None), EXPERTS._apply_gate)
            return FusedGate(child, self) if is_known else None
        code = next((code for code in _ATTENTION_CODES if has_same_code(forward, code.forward)), None)
        return FusedAttention(child, self, code) if code is not None and _calls_llama_functions(forward) else None


class _Replacement(nn.Module):
    """A module that shares all attributes with the original, also the dict of parameters: a weight set in one is set in
    both."""

    def __init__(self, original: nn.Module, ops: FusedOps):
        super().__init__()
        vars(self).update(vars(original))
        self.ops = ops


class FusedRMSNorm(_Replacement):
    """Llama's RMS norm in one pass over memory. Source: Zhang and Sennrich, "Root Mean Square Layer Normalization"
    (2019)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out = self.ops.norm(hidden_states, cast(torch.Tensor, self.weight), cast(float, self.variance_epsilon))
        return llama.LlamaRMSNorm.forward(cast(llama.LlamaRMSNorm, self), hidden_states) if out is None else out


class FusedGatedMLP(_Replacement):
    """Llama's feed-forward with a fused gate. Source: Shazeer, "GLU Variants Improve Transformer" (2020)."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., D) to (..., D), `mlp_rows` rows at a time to bound the memory of the intermediate activation."""
        if self.ops.mlp_rows is None:
            return self.down_proj(self._inner(x))
        runs = x.reshape(-1, x.shape[-1]).split(self.ops.mlp_rows)
        outs = [self.down_proj(self._inner(x_RD)) for x_RD in runs]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.view(*x.shape[:-1], out.shape[-1])

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        out = self.ops.gate(gate, up)
        return nn.functional.silu(gate) * up if out is None else out


class FusedGate(nn.Module):
    """The SiLU of an experts module. `forward` applies it alone; callers may use `ops.gate_halves`, which fuses it with
    the product of the gate."""

    def __init__(self, act: nn.Module, ops: FusedOps):
        super().__init__()
        self.act, self.ops = act, ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


@dataclass(frozen=True, kw_only=True)
class _AttentionCode:
    """A forward that `FusedAttention` can replace."""

    forward: Callable[..., object]
    has_norms: bool = False  # queries and keys are normalized per head
    # Attention module -> the keyword arguments about its window for the attention function.
    window: Callable[[Any], dict[str, int | None]] = lambda attention: {"sliding_window": attention.sliding_window}


_ATTENTION_CODES = (
    _AttentionCode(forward=llama.LlamaAttention.forward, window=lambda attention: {}),
    _AttentionCode(
        forward=MistralAttention.forward,
        window=lambda attention: {"sliding_window": getattr(attention.config, "sliding_window", None)},
    ),
    _AttentionCode(forward=Qwen2Attention.forward),
    _AttentionCode(forward=Qwen3Attention.forward, has_norms=True),
)


class FusedAttention(_Replacement):
    """Llama's attention with fused rotary embeddings. Source: Su et al., "RoFormer: Enhanced Transformer with Rotary
    Position Embedding" (2021)."""

    def __init__(self, original: nn.Module, ops: FusedOps, code: _AttentionCode):
        super().__init__(original, ops)
        self.has_norms, self.window = code.has_norms, code.window(original)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps (B, T, hidden size) to the same shape. Stores keys and values in `past_key_values`, and calls the
        attention function that the config names."""
        module: Any = self  # Any: attributes are the original's
        shape = hidden_states.shape[:-1]
        projections = (module.q_proj, module.k_proj, module.v_proj)
        q, k, v = (project(hidden_states).view(*shape, -1, module.head_dim) for project in projections)
        if self.has_norms:
            q, k = module.q_norm(q), module.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        rotated = self.ops.rotate(q, k, *position_embeddings)
        q, k = llama.apply_rotary_pos_emb(q, k, *position_embeddings) if rotated is None else rotated
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, module.layer_idx)
        name, scaling = module.config._attn_implementation, module.scaling
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, llama.eager_attention_forward)
        out, scores = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=scaling, **self.window, **kwargs)
        return module.o_proj(out.reshape(*shape, -1).contiguous()), scores


def fuse(model: nn.Module, ops: FusedOps) -> Counter[str]:
    """Replaces supported modules in `model`. Returns the number of replacements by kind, such as "RMS norms"."""
    replacements = dict[nn.Module, nn.Module]()  # original -> replacement; a module may have several parents
    for parent in reversed(list(model.modules())):  # children first: a replacement shares its original's children
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            replacement = replacements.get(child) or ops.make_replacement(parent, name, child)
            if replacement is not None:
                replacements[child] = parent._modules[name] = replacement
    return Counter(_KINDS[type(replacement)] for replacement in replacements.values())


_KINDS: dict[type[nn.Module], str] = {
    FusedRMSNorm: "RMS norms",
    FusedGatedMLP: "gated feed-forwards",
    FusedAttention: "rotary embeddings",
    FusedGate: "gates of experts",
}


def _calls_llama_functions(forward: Callable[..., object]) -> bool:
    """True if the functions that an attention class calls by name have Llama's code."""
    # Functions that the forward calls, and the function that each of them calls.
    for name, inner in (("apply_rotary_pos_emb", "rotate_half"), ("eager_attention_forward", "repeat_kv")):
        function = _globals_of(forward).get(name)
        if not has_same_code(function, vars(llama)[name]):
            return False
        if not has_same_code(_globals_of(function).get(inner), vars(llama)[inner]):
            return False
    return True


def _globals_of(function: object) -> dict[str, object]:
    return getattr(function, "__globals__", {})


def has_same_code(function: object, known: object) -> bool:
    """True if two functions have the same bytecode, names and constants. Ignores defaults and docstrings."""
    bodies = list[tuple[object, ...]]()
    for compared in (function, known):
        code = getattr(compared, "__code__", None)
        if not isinstance(code, CodeType):
            return False
        constants = [value for value in code.co_consts if value is not None and value != compared.__doc__]
        bodies.append((code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))
    return bodies[0] == bodies[1]
