"""The work of stages and layers: weights to multiply, and bytes that operators read and write; used by simulator and
roofline. Also the CPU's speed at experts, which sets its share of them.
"""

from dataclasses import dataclass, replace

from ..placement.experts import expected_hits, pageable_stages
from ..placement.feedforward import CpuShare
from ..placement.placement import Placement
from ..shape.model import ModelShape
from ..shape.numbers import Numbers
from ..shape.shapes import Stage, StageKind, distinct_bytes
from .rates import NOTHING_STORED, MachineRates, StoredWork

# How often transformers' decoder layers read or write a token's vectors, without fused operators; a profiling pass
# measures fused CPU operators. Hidden: two norms at 7 and two sums at 3, attention's input and output. Heads: rotary
# embeddings of queries and keys at 8, the cache and a change of layout. Inner: an activation and its product with the
# gate.
HIDDEN_ROUND_TRIPS = 24
HEAD_ROUND_TRIPS = 12
INNER_ROUND_TRIPS = 5
VISIT_ROUND_TRIPS = 8  # per expert visit of a token: gathered, weighted and added
LOGIT_ROUND_TRIPS = 6  # a change of layout, a check for finite values, and the argmax
EXPANDED_ROUND_TRIPS = 6  # of keys and values expanded from latents
MIN_MEMORY_SHARE = 0.5  # minimum share of host bandwidth left to the CPU while the link reads


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Work of one stage. `*_weights` count matrix elements; `pre_attention_weights` is the part of `dense_weights`
    before attention. `num_bytes`: bytes loaded into a slot, for paged experts the dense part only."""

    kind: StageKind
    num_bytes: int
    dense_weights: float
    pre_attention_weights: float
    expert_weights: float  # of one expert
    expert_bytes: float
    num_experts: int
    num_experts_per_token: int
    kv_bytes: int  # per position
    token_bytes: float  # read and written per token, experts excluded
    visit_bytes: float  # the same per expert visit, on average over all experts, of which this rank has a part
    is_paged: bool  # its experts are read one by one
    uses_cpu_experts: bool  # the CPU may compute some of its experts
    can_skip_unselected: bool  # after its KV is cached, only tokens that need logits continue (`model/stages.py`)
    stored: StoredWork = NOTHING_STORED  # weights to dequantize, without experts
    stored_experts: StoredWork = NOTHING_STORED  # the same of all experts, or of one if paged

    def hits(self, num_tokens: Numbers) -> Numbers:
        """Returns the expected distinct experts that `num_tokens` visit; only for stages with experts."""
        return expected_hits(self.num_experts, self.num_experts_per_token, num_tokens)


def stage_works(
    shape: ModelShape, paged: frozenset[int], cpu_expert_stages: frozenset[int] = frozenset()
) -> list[StageWork]:
    first = shape.layers[0].index if shape.layers else 0
    works = [_stage_work(shape, stage, stage.index in paged, stage.index - first) for stage in shape.stages]
    return [
        replace(work, uses_cpu_experts=True) if stage in cpu_expert_stages else work for stage, work in enumerate(works)
    ]


def _stage_work(shape: ModelShape, stage: Stage, is_paged: bool, layer: int) -> StageWork:
    dense = stage.num_dense_weights
    count, size = max(1, stage.num_experts), shape.compute_dtype_bytes
    looked_up = stage.kind in (StageKind.embedding, StageKind.bridge)
    stacks = {p.name for p in stage.stacks}
    stored = () if looked_up else [p for p in stage.parameters if p.name not in stacks]
    experts = StoredWork.from_parameters(stage.stacks, shape.compute_dtype)
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    has_inner = stage.kind.is_layer and dense > 3 * heads * shape.hidden_size  # mixtures may have experts only
    token = (
        HIDDEN_ROUND_TRIPS * shape.hidden_size
        + HEAD_ROUND_TRIPS * heads
        + INNER_ROUND_TRIPS * shape.intermediate_size * has_inner
    )
    return StageWork(
        kind=stage.kind,
        num_bytes=stage.dense.num_bytes if is_paged else stage.num_bytes,
        dense_weights=0 if looked_up else dense,
        pre_attention_weights=min(dense, heads * shape.hidden_size),
        expert_weights=sum(p.num_elements for p in stage.stacks) / count,
        expert_bytes=(stage.num_bytes - stage.dense.num_bytes) / count,
        num_experts=stage.num_experts,
        num_experts_per_token=stage.num_experts_per_token,
        kv_bytes=shape.kv_layer_bytes[layer] if stage.kind is StageKind.layer else 0,
        token_bytes=float(size * (token if stage.kind.is_layer else 2 * shape.hidden_size)),
        is_paged=is_paged,
        uses_cpu_experts=False,
        can_skip_unselected=shape.is_packed and stage in shape.layers[-1:],
        visit_bytes=size
        * stage.local_expert_share
        * (VISIT_ROUND_TRIPS * shape.hidden_size + INNER_ROUND_TRIPS * shape.intermediate_size),
        stored=StoredWork.from_parameters(stored, shape.compute_dtype),
        # All experts together, or one expert if paged.
        stored_experts=experts.times(1 / (count if is_paged else 1))._replace(num_matrices=experts.num_matrices),
    )


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The average decoder layer, and the stages around the layers. `*_weights` count elements that a token may be
    multiplied with, `*_bytes` bytes in the checkpoint or cache. `num_experts` is 0 for a dense model."""

    num_layers: int
    dense_bytes: float  # weights that every token needs
    expert_bytes: float  # of one expert
    dense_weights: float
    ffn_weights: float  # of `dense_weights`, those after attention
    expert_weights: float  # of one expert
    num_experts: int
    num_experts_per_token: int
    is_pageable: bool
    kv_bytes: float  # per position
    query_bytes: float  # of one token's queries, and of its attention outputs
    hidden_bytes: float  # of one token between layers
    pair_flops: float  # attention per token and position
    head_weights: float
    outer_bytes: float  # embeddings and head; shared tensors count once
    widest_outer_bytes: float  # the largest of them
    stored: StoredWork = NOTHING_STORED  # weights to dequantize, without experts
    stored_experts: StoredWork = NOTHING_STORED  # the same of all experts

    @staticmethod
    def from_shape(shape: ModelShape) -> "LayerWork":
        """Makes the average of the decoder's layers; encoder layers are not part of a decode pass."""
        layers, outer = shape.layers, [stage for stage in shape.stages if not stage.kind.is_layer]
        stacks = [parameter for stage in layers for parameter in stage.stacks]
        parameters = [parameter for stage in layers for parameter in stage.parameters]
        dtype = shape.compute_dtype
        stored, stored_experts = (StoredWork.from_parameters(each, dtype) for each in (parameters, stacks))
        share = 1 / max(1, len(layers))
        num_experts = max((stage.num_experts for stage in layers), default=0)
        stack_bytes = sum(p.num_bytes for p in stacks)
        heads = shape.num_heads * shape.head_dim
        attention_weights = (2 * heads + 2 * shape.num_kv_heads * shape.head_dim) * shape.hidden_size
        dense_weights = share * sum(stage.num_dense_weights for stage in layers)
        return LayerWork(
            num_layers=len(layers),
            dense_bytes=share * (sum(p.num_bytes for p in parameters) - stack_bytes),
            expert_bytes=share * stack_bytes / max(1, num_experts),
            dense_weights=dense_weights,
            ffn_weights=max(0.0, dense_weights - attention_weights),
            expert_weights=share * sum(p.num_elements for p in stacks) / max(1, num_experts),
            num_experts=num_experts,
            num_experts_per_token=max((stage.num_experts_per_token for stage in layers), default=0),
            is_pageable=bool(pageable_stages(shape)),
            kv_bytes=share * shape.kv_bytes_per_token,
            query_bytes=heads * shape.compute_dtype_bytes,
            hidden_bytes=shape.hidden_size * shape.compute_dtype_bytes,
            pair_flops=4.0 * heads,
            head_weights=sum(stage.num_dense_weights for stage in shape.stages_of_kind(StageKind.head)),
            outer_bytes=distinct_bytes(p for stage in outer for p in stage.parameters),
            widest_outer_bytes=max((stage.num_bytes for stage in outer), default=0),
            stored=stored.plus(stored_experts.times(-1)).times(share),
            stored_experts=stored_experts.times(share),
        )

    def hits(self, num_tokens: Numbers) -> Numbers:
        """Returns the expected distinct experts of a layer that `num_tokens` visit; only for mixtures."""
        return expected_hits(self.num_experts, self.num_experts_per_token, num_tokens)

    @property
    def num_bytes(self) -> float:
        """The bytes of a whole layer."""
        return self.dense_bytes + self.num_experts * self.expert_bytes

    @property
    def flops_per_token(self) -> float:
        """Two FLOPs per weight that a token is multiplied with."""
        return 2 * (self.dense_weights + self.num_experts_per_token * self.expert_weights)

    @property
    def ffn_bytes(self) -> float:
        """The bytes of the weights after attention."""
        share = self.ffn_weights / max(1.0, self.dense_weights)
        return share * self.dense_bytes + self.num_experts * self.expert_bytes

    @property
    def ffn_flops_per_token(self) -> float:
        return 2 * (self.ffn_weights + self.num_experts_per_token * self.expert_weights)


def with_cpu_share(shape: ModelShape, placement: Placement, rates: MachineRates | None) -> Placement:
    """Returns `placement` with the CPU's share of experts derived from the rates, if known."""
    share = placement.cpu_share
    if share is None or rates is None:
        return placement
    first = stage_works(shape, placement.paged)[min(placement.cpu_expert_stages)]
    return replace(
        placement, cpu_share=make_cpu_share(first.expert_bytes, first.expert_weights, rates, share.max_tokens)
    )


def make_cpu_share(expert_bytes: float, expert_weights: float, rates: MachineRates, max_tokens: int) -> CpuShare:
    """Returns the CPU's share of experts. An expert takes the longer of reading its weights (launches included)
    and multiplying them. The link's reads reduce the CPU's memory bandwidth."""
    link, memory = rates.link_in_bytes_per_second, rates.cpu_attention_bytes_per_second
    cpu_memory = max(memory - link, MIN_MEMORY_SHARE * memory)
    share = CpuShare(max_tokens=max_tokens, reading=link / cpu_memory + rates.hit_seconds * link / expert_bytes)
    if rates.cpu_flops_per_second is None:
        return share
    return replace(share, multiplying=2 * expert_weights / rates.cpu_flops_per_second * link / expert_bytes)


def num_cpu_experts(share: CpuShare | None, work: StageWork, num_tokens: float) -> int:
    """Returns how many of a stage's experts the CPU computes, for `num_tokens` with even visits."""
    if share is None or not work.uses_cpu_experts or not 0 < num_tokens <= share.max_tokens:
        return 0
    num_hit = max(1, round(work.hits(num_tokens)))
    return share.num_experts(num_hit, num_tokens * work.num_experts_per_token / num_hit)
