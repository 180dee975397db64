"""What a stage asks of a machine for each token that passes it: weights to multiply with, and bytes that its operators
read and write."""

from dataclasses import dataclass

from ..placement.experts import expected_hits
from ..shape.model import ModelShape
from ..shape.shapes import Parameter, Stage, StageKind

# How often the operators of transformers' decoder layers go over a token's vectors, each read or write counted; nothing
# is fused; what a CPU's joined steps spare shows in a profiling pass. Two norms at 7 and two sums at 3, and what
# attention is handed and gives; rotary embeddings of queries and keys at 8, the cache and a change of layout; an
# activation and its product with the gate.
HIDDEN_TRIPS = 24
HEAD_TRIPS = 12
INNER_TRIPS = 5
VISIT_TRIPS = 8  # of a token that visits an expert: taken, weighed and added
LOGIT_TRIPS = 6  # a change of layout, whether all are finite, and the largest
EXPANDED_TRIPS = 6  # of keys and values that a layer makes of latents


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Weights count the numbers of matrices; `early_weights` are those of `dense_weights` in front of attention.
    `num_bytes` is what a slot receives: of a stage whose experts are paged the dense part."""

    kind: StageKind
    num_bytes: int
    dense_weights: float
    early_weights: float
    expert_weights: float  # of one expert
    expert_bytes: float
    num_experts: int
    num_experts_per_token: int
    kv_bytes: int  # of one position
    token_bytes: float  # that a token's operators read and write, those of experts excluded
    visit_bytes: float  # and those of one of its experts
    is_paged: bool  # its experts are read one by one
    is_narrow: bool  # behind keys and values it has only tokens that are asked for (`model/last_layer.py`)

    def hits(self, num_tokens: float) -> float:
        """Distinct experts that so many tokens visit."""
        return expected_hits(self.num_experts, self.num_experts_per_token, num_tokens)


def stage_works(shape: ModelShape, paged: frozenset[int]) -> list[StageWork]:
    first = shape.layers[0].index if shape.layers else 0
    return [_of(shape, stage, stage.index in paged, stage.index - first) for stage in shape.stages]


def _of(shape: ModelShape, stage: Stage, is_paged: bool, layer: int) -> StageWork:
    stacks = [p for p in stage.parameters if _is_stack(stage, p)]
    dense = sum(p.num_elements for p in stage.parameters if len(p.shape) == 2 and not _is_stack(stage, p))
    if stage.kind in (StageKind.embedding, StageKind.bridge):
        dense = 0  # looked up, not multiplied with
    count, size = max(1, stage.num_experts), shape.compute_dtype_bytes
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    has_inner = stage.kind.is_layer and dense > 3 * heads * shape.hidden_size  # beside experts there may be none
    token = HIDDEN_TRIPS * shape.hidden_size + HEAD_TRIPS * heads + INNER_TRIPS * shape.intermediate_size * has_inner
    return StageWork(
        kind=stage.kind,
        num_bytes=stage.dense.num_bytes if is_paged else stage.num_bytes,
        dense_weights=dense,
        early_weights=min(dense, heads * shape.hidden_size),
        expert_weights=sum(p.num_elements for p in stacks) / count,
        expert_bytes=(stage.num_bytes - stage.dense.num_bytes) / count,
        num_experts=stage.num_experts,
        num_experts_per_token=stage.num_experts_per_token,
        kv_bytes=shape.kv_layer_bytes[layer] if stage.kind is StageKind.layer else 0,
        token_bytes=float(size * (token if stage.kind.is_layer else 2 * shape.hidden_size)),
        is_paged=is_paged,
        is_narrow=shape.is_packed and stage in shape.layers[-1:],
        visit_bytes=float(size * (VISIT_TRIPS * shape.hidden_size + INNER_TRIPS * shape.intermediate_size)),
    )


def _is_stack(stage: Stage, parameter: Parameter) -> bool:
    return bool(stage.num_experts) and (parameter.is_experts or parameter.is_stacked or len(parameter.shape) == 3)
