"""What a model is made of, in bytes and FLOPs: plain values, no torch. Everything planned is computed from these.

A **stage** is what the weights of one step of the forward pass are called: 0 is the embeddings, 1..L the decoder
layers, the last one the norm and head. A stage's **parameters** say which bytes of which file they are.
"""

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import prod


class StageKind(Enum):
    embedding = "embedding"
    layer = "layer"
    head = "head"


@dataclass(frozen=True, kw_only=True)
class TensorSlice:
    """The bytes of one checkpoint tensor: `num_bytes` from `offset` of `file`, holding `shape` of `dtype`."""

    name: str
    file: str
    offset: int
    num_bytes: int
    dtype: str  # safetensors' name: F32, BF16, F16, I64 ...
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One argument of a stage's module, put together from tensor slices without copying.

    `pieces[e]` are the slices whose rows, one below the other, make entry `e` of a stacked parameter (an expert); a
    parameter that is not stacked has one entry, nearly always of one slice.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[TensorSlice, ...], ...]
    is_stacked: bool = False

    @property
    def slices(self) -> tuple[TensorSlice, ...]:
        return tuple(piece for entry in self.pieces for piece in entry)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @cached_property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.slices)


@dataclass(frozen=True, kw_only=True)
class Stage:
    index: int
    name: str
    kind: StageKind
    parameters: tuple[Parameter, ...]
    num_experts: int = 0  # 0: dense
    num_experts_per_token: int = 0

    @cached_property
    def num_bytes(self) -> int:
        return sum({piece.name: piece.num_bytes for p in self.parameters for piece in p.slices}.values())

    @cached_property
    def flops_per_token(self) -> float:
        """Two per weight that a token is multiplied with; of stacked experts only the share that a token visits."""
        if self.kind is StageKind.embedding:
            return 0.0
        dense = sum(p.num_elements for p in self.parameters if len(p.shape) == 2)
        experts = sum(p.num_elements for p in self.parameters if p.is_stacked or len(p.shape) == 3)
        share = self.num_experts_per_token / self.num_experts if self.num_experts else 1.0
        return 2.0 * (dense + share * experts)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes that memory and time follow from. `*_bytes_per_token` are for one sequence position over all layers."""

    name: str
    stages: tuple[Stage, ...]
    hidden_size: int
    intermediate_size: int  # widest feed-forward activation a token meets, experts per token included
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    num_kv_layers: int
    compute_dtype_bytes: int
    is_packed: bool  # lanes without padding
    weight_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        slices = {piece.name: piece.num_bytes for s in self.stages for p in s.parameters for piece in p.slices}
        object.__setattr__(self, "weight_bytes", sum(slices.values()))

    @property
    def layers(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.kind is StageKind.layer)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_kv_layers * self.num_kv_heads * self.head_dim * self.compute_dtype_bytes
