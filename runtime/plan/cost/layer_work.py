"""What one decoder layer of a model asks of a machine: bytes and weights of the average layer."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..placement.experts import pageable_stages
from ..shape.model import ModelShape
from ..shape.shapes import Parameter, StageKind, distinct_bytes


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """`*_weights` count the numbers that a token may be multiplied with, `*_bytes` what lies in the checkpoint or in a
    cache. Of a dense layer `num_experts` is 0."""

    num_layers: int
    dense_bytes: float  # of the weights that every token needs
    expert_bytes: float  # of one expert
    dense_weights: float
    ffn_weights: float  # of `dense_weights`, those behind attention
    expert_weights: float  # of one expert
    num_experts: int
    num_experts_per_token: int
    is_pageable: bool
    kv_bytes: float  # of one position
    query_bytes: float  # of one token's queries, and of its answers
    hidden_bytes: float  # of one token between layers
    pair_flops: float  # attention, of one token that looks at one position
    head_weights: float
    outer_bytes: float  # stages that are no layer; what two of them share, once
    widest_outer_bytes: float  # of the largest of them

    @staticmethod
    def of(shape: ModelShape) -> "LayerWork":
        """Layers of an encoder count with the decoder's bytes alone: a decode pass does not see them."""
        layers, outer = shape.layers, [stage for stage in shape.stages if not stage.kind.is_layer]
        share = 1 / max(1, len(layers))
        stacked = [p for stage in layers for p in stage.parameters if _is_stack(p)]
        dense = [p for stage in layers for p in stage.parameters if not _is_stack(p)]
        num_experts = max((stage.num_experts for stage in layers), default=0)
        heads = shape.num_heads * shape.head_dim
        attention_weights = (2 * heads + 2 * shape.num_kv_heads * shape.head_dim) * shape.hidden_size
        dense_weights = share * sum(p.num_elements for p in dense if len(p.shape) == 2)
        return LayerWork(
            num_layers=len(layers),
            dense_bytes=share * _num_bytes(dense),
            expert_bytes=share * _num_bytes(stacked) / max(1, num_experts),
            dense_weights=dense_weights,
            ffn_weights=max(0.0, dense_weights - attention_weights),
            expert_weights=share * sum(p.num_elements for p in stacked) / max(1, num_experts),
            num_experts=num_experts,
            num_experts_per_token=max((stage.num_experts_per_token for stage in layers), default=0),
            is_pageable=bool(pageable_stages(shape)),
            kv_bytes=share * shape.kv_bytes_per_token,
            query_bytes=heads * shape.compute_dtype_bytes,
            hidden_bytes=shape.hidden_size * shape.compute_dtype_bytes,
            pair_flops=4.0 * heads,
            head_weights=sum(stage.flops_per_token for stage in shape.of_kind(StageKind.head)) / 2,
            outer_bytes=distinct_bytes(p for stage in outer for p in stage.parameters),
            widest_outer_bytes=max((stage.num_bytes for stage in outer), default=0),
        )

    @property
    def num_bytes(self) -> float:
        """Of the whole layer's weights."""
        return self.dense_bytes + self.num_experts * self.expert_bytes

    @property
    def flops_per_token(self) -> float:
        """Two per weight that a token is multiplied with."""
        return 2 * (self.dense_weights + self.num_experts_per_token * self.expert_weights)

    @property
    def ffn_bytes(self) -> float:
        """Of the weights behind attention."""
        share = self.ffn_weights / max(1.0, self.dense_weights)
        return share * self.dense_bytes + self.num_experts * self.expert_bytes

    @property
    def ffn_flops_per_token(self) -> float:
        return 2 * (self.ffn_weights + self.num_experts_per_token * self.expert_weights)


def _is_stack(parameter: Parameter) -> bool:
    return parameter.is_stacked or len(parameter.shape) == 3


def _num_bytes(parameters: Iterable[Parameter]) -> int:
    return sum(parameter.num_bytes for parameter in parameters)
