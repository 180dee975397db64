"""The work of stages and layers: weights to multiply, and bytes that operators read and write.

Simulator and roofline compute times from it. The module also derives how many experts the CPU computes. A **visit** is
one expert computed for one token; **paged** experts are read one by one.
"""

from dataclasses import dataclass, replace

from ...units import round_up
from ..placement.experts import Routing, expected_hits, pageable_stages
from ..placement.feedforward import CpuShare
from ..placement.placement import Placement
from ..shape.extents import ALIGNMENT_BYTES
from ..shape.model import ModelShape
from ..shape.numbers import Numbers
from ..shape.shapes import Stage, StageKind, distinct_bytes
from .rates import NOTHING_STORED, MachineRates, StoredWork

# How often unfused operators of transformers' decoder layers read or write a token's vectors. (For fused operators on a
# CPU, a profiling pass measures the time instead.)
HIDDEN_ROUND_TRIPS = 24  # hidden vectors: 2 norms with 7 each, 2 sums with 3 each, input and output of attention
HEAD_ROUND_TRIPS = 12  # queries, keys, values: 8 in rotary embeddings, the cache, a change of layout
INNER_ROUND_TRIPS = 5  # intermediate vectors: the activation, and its product with the gate
VISIT_ROUND_TRIPS = 8  # per expert visit of a token: gathered, weighted and added
LOGIT_ROUND_TRIPS = 6  # a change of layout, a check for finite values, and the argmax
EXPANDED_ROUND_TRIPS = 6  # of keys and values expanded from latents
MIN_MEMORY_SHARE = 0.5  # minimum share of host bandwidth left to the CPU while the link reads


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Work of one stage. `*_weights` count matrix elements."""

    kind: StageKind
    num_bytes: int  # loaded into a slot, without paged experts
    dense_weights: float  # weights that every token is multiplied with
    pre_attention_weights: float  # the part of `dense_weights` before attention
    expert_weights: float  # of one expert
    expert_bytes: float  # of one expert
    num_experts: int
    num_experts_per_token: int
    kv_bytes: int  # per position
    table_bytes: float  # disk blocks per token, for rows of embedding tables
    token_bytes: float  # read and written per token by operators between products, without experts
    visit_bytes: float  # the same per visit; less if this rank has only a part of the experts
    is_paged: bool  # experts are paged
    uses_cpu_experts: bool  # the CPU may compute some experts
    can_skip_unselected: bool  # only tokens that need logits continue after the stage has cached KV (`model/stages.py`)
    stored: StoredWork = NOTHING_STORED  # quantized weights, without experts
    stored_experts: StoredWork = NOTHING_STORED  # quantized weights of all experts, or of one expert if paged
    kept_share: float = 0.0  # of all paged experts: those that stay in compute memory
    routing: Routing | None = None  # measured hits; None: tokens visit all experts evenly

    def hits(self, num_tokens: float) -> float:
        """Returns the expected number of experts that `num_tokens` visit. The stage must have experts."""
        if self.routing is not None:
            return self.num_experts * self.routing.hit_share(num_tokens)
        return expected_hits(self.num_experts, self.num_experts_per_token, num_tokens)

    def hits_to_read(self, num_tokens: float) -> float:
        """Returns the expected number of visited experts that are not kept in compute memory, for a paged stage.

        Without measured hits, kept experts are visited as often as others.
        """
        if self.routing is not None:
            return self.num_experts * self.routing.hit_share(num_tokens, self.kept_share)
        return (1 - self.kept_share) * self.hits(num_tokens)


def stage_works(shape: ModelShape, paged: frozenset[int], placement: Placement | None = None) -> list[StageWork]:
    """Returns the work by stage. `paged`: stages with paged experts. `placement`: which of them are where, if known."""
    first = shape.layers[0].index if shape.layers else 0
    works = [_stage_work(shape, stage, stage.index in paged, stage.index - first) for stage in shape.stages]
    if placement is None:
        return works
    kept_share = placement.num_kept_experts / max(1, sum(shape.stages[stage].num_experts for stage in paged))
    return [
        replace(
            work,
            uses_cpu_experts=stage in placement.cpu_expert_stages,
            kept_share=kept_share if stage in paged else 0.0,
            routing=placement.routing if work.num_experts else None,
        )
        for stage, work in enumerate(works)
    ]


def _stage_work(shape: ModelShape, stage: Stage, is_paged: bool, layer: int) -> StageWork:
    """Returns the work of a stage. `layer`: number of the decoder layer, unused for other stages."""
    dense = stage.num_dense_weights
    count, size = max(1, stage.num_experts), shape.compute_dtype_bytes
    is_lookup = stage.kind in (StageKind.embedding, StageKind.bridge)
    stacks = {p.name for p in stage.stacks}
    stored = () if is_lookup else [p for p in stage.parameters if p.name not in stacks]
    experts = StoredWork.from_parameters(stage.stacks, shape.compute_dtype)
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    # Dense weights that are too many for attention alone: the layer has a dense feed-forward part, not only experts.
    has_inner = stage.kind.is_layer and dense > 3 * heads * shape.hidden_size
    token_elements = (
        HIDDEN_ROUND_TRIPS * shape.hidden_size
        + HEAD_ROUND_TRIPS * heads
        + INNER_ROUND_TRIPS * shape.intermediate_size * has_inner
    )
    return StageWork(
        kind=stage.kind,
        num_bytes=stage.dense.num_bytes if is_paged else stage.num_bytes,
        dense_weights=0 if is_lookup else dense,
        pre_attention_weights=min(dense, heads * shape.hidden_size),
        expert_weights=sum(p.num_elements for p in stage.stacks) / count,
        expert_bytes=(stage.num_bytes - stage.dense.num_bytes) / count,
        num_experts=stage.num_experts,
        num_experts_per_token=stage.num_experts_per_token,
        kv_bytes=shape.kv_layer_bytes[layer] if stage.kind is StageKind.layer else 0,
        table_bytes=sum(table.rows_per_token * round_up(table.row_bytes, ALIGNMENT_BYTES) for table in stage.tables),
        token_bytes=float(size * (token_elements if stage.kind.is_layer else 2 * shape.hidden_size)),
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
    """Work of the average decoder layer, and of all other stages together.

    `*_weights` count matrix elements, `*_bytes` count bytes in the checkpoint or in the KV cache.
    """

    num_layers: int
    dense_bytes: float  # weights that every token is multiplied with
    expert_bytes: float  # of one expert
    dense_weights: float  # elements of `dense_bytes`
    ffn_weights: float  # the part of `dense_weights` after attention
    expert_weights: float  # of one expert
    num_experts: int  # per layer; 0: a dense model
    num_experts_per_token: int
    is_pageable: bool
    kv_bytes: float  # per position
    query_bytes: float  # queries of one token; its attention outputs have the same size
    hidden_bytes: float  # hidden vector of one token
    pair_flops: float  # attention FLOPs per pair of query and key
    head_weights: float
    outer_bytes: float  # stages that are not layers, such as embeddings and head; shared tensors count once
    widest_outer_bytes: float  # the largest of these stages
    stored: StoredWork = NOTHING_STORED  # quantized weights of a layer, without experts
    stored_experts: StoredWork = NOTHING_STORED  # quantized weights of all experts of a layer

    @staticmethod
    def from_shape(shape: ModelShape) -> "LayerWork":
        """Makes the average of all decoder layers. Encoder layers are left out, as decode passes skip them."""
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
        """Returns the expected number of experts of a layer that `num_tokens` visit. The model must have experts."""
        return expected_hits(self.num_experts, self.num_experts_per_token, num_tokens)

    @property
    def num_bytes(self) -> float:
        """The bytes of a whole layer."""
        return self.dense_bytes + self.num_experts * self.expert_bytes

    @property
    def flops_per_token(self) -> float:
        """The FLOPs of products per token: two for each weight that the token is multiplied with."""
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
    """Returns `placement` with the CPU's share of experts derived from the rates. Unchanged without rates."""
    share = placement.cpu_share
    if share is None or rates is None:
        return placement
    first = stage_works(shape, placement.paged)[min(placement.cpu_expert_stages)]
    return replace(
        placement, cpu_share=make_cpu_share(first.expert_bytes, first.expert_weights, rates, share.max_tokens)
    )


def make_cpu_share(expert_bytes: float, expert_weights: float, rates: MachineRates, max_tokens: int) -> CpuShare:
    """Returns the rule for the CPU's share of experts. Its times are relative to copying an expert over the link.

    An expert takes the CPU as long as reading its weights (with kernel launches), or as multiplying them if that takes
    longer. The link reads host memory at the same time, which leaves less bandwidth for the CPU.
    """
    link, memory = rates.link_in_bytes_per_second, rates.cpu_attention_bytes_per_second
    cpu_memory = max(memory - link, MIN_MEMORY_SHARE * memory)
    share = CpuShare(max_tokens=max_tokens, reading=link / cpu_memory + rates.hit_seconds * link / expert_bytes)
    if rates.cpu_flops_per_second is None:
        return share
    return replace(share, multiplying=2 * expert_weights / rates.cpu_flops_per_second * link / expert_bytes)


def num_cpu_experts(share: CpuShare | None, work: StageWork, num_tokens: float) -> int:
    """Returns how many experts of a stage the CPU computes for `num_tokens`, if all hit experts have equal visits."""
    if share is None or not work.uses_cpu_experts or not 0 < num_tokens <= share.max_tokens:
        return 0
    num_hit = max(1, round(work.hits(num_tokens)))
    return share.num_experts(num_hit, num_tokens * work.num_experts_per_token / num_hit)
