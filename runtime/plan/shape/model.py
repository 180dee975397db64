"""Sizes of a model as plain values without torch: everything that a plan needs to know about the model.

A **lane** is a micro-batch in execution: packed sequences, or in a **padded lane** left-padded rows. A **stage** is the
weights of one step of the forward pass, see shapes.py.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from ...config.settings import KVDType
from .attention import AttentionMethod, DeltaRule
from .shapes import Parameter, Stage, StageKind, inner_size
from .stage_sizes import StageSizes


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model, or of one rank's part of it. `*_bytes_per_token`: bytes per position, over all layers."""

    name: str
    stages: tuple[Stage, ...]
    hidden_size: int
    intermediate_size: int  # widest feed-forward layer, in elements per token; at least the width of one expert
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    kv_layer_bytes: tuple[int, ...]  # KV bytes per position, by decoder layer; 0: the layer has no KV cache
    compute_dtype_bytes: int
    is_packed: bool  # lanes are packed, not padded
    state_bytes_per_sequence: int = 0  # recurrent states of all layers
    state_layer_bytes: tuple[int, ...] = ()  # recurrent state per sequence, by decoder layer; empty: unknown
    expanded_kv_width: int = 0  # elements per position to which attention expands latents (MLA); 0: no latents
    cross_kv_bytes_per_token: int = 0  # cross-attention KV per encoder position, over all decoder layers
    score_heads: int = 0  # heads whose prefill scores are in memory at a time; 0: a fused kernel keeps none
    bounded_layers: frozenset[int] = frozenset()  # decoder layers of padded lanes with a sliding-window cache
    restart_tokens: int | None = None  # sequence length at which all keys are recomputed (LongRoPE)
    has_decode_kernel: bool = False  # a CPU kernel computes decode attention without scores in main memory
    attention_method: AttentionMethod = AttentionMethod.host  # of packed lanes on the compute device
    has_fused_gates: bool = False  # feed-forward layers run in blocks of tokens, with the gate product in place
    has_whole_prompts: bool = False  # padded lanes cannot prefill in chunks
    has_bare_experts: bool = False  # experts run in model/expert_groups.py and have no biases
    delta_rule: DeltaRule | None = None  # sizes of gated delta net layers; None: no such layers
    kv_dtype: KVDType = KVDType.auto  # storage of the KV cache, see dtypes.py
    kv_heads: tuple[tuple[int, int, int], ...] = ()  # by decoder layer: KV heads, key size, value size per head
    kv_tail_bytes_per_sequence: int = 0  # newest KV page, unquantized, of all layers; 0: KV is not quantized
    rank_stages: range | None = None  # stages computed by this pipeline rank, see rank_shares.py; None: all
    compute_dtype: str = ""  # safetensors name; "": unknown
    draft: "ModelShape | None" = None  # small model in compute memory that guesses tokens
    is_mtp_head: bool = False  # an MTP head, which takes hidden states beside tokens
    num_parts: int = 1  # tensor-parallel ranks that divide the model; this shape is the part of one
    weight_bytes: int = field(init=False, default=0)  # of all stages; shared tensors count once

    def __post_init__(self) -> None:
        slices = {piece.name: piece.num_bytes for s in self.stages for p in s.parameters for piece in p.slices}
        object.__setattr__(self, "weight_bytes", sum(slices.values()))

    def with_head_share(self, num_parts: int) -> "ModelShape":
        """Returns the shape with heads and KV sizes divided by `num_parts`. Its `stages` must be one rank's part."""
        return replace(
            self,
            num_parts=num_parts,
            num_heads=self.num_heads // num_parts,
            num_kv_heads=self.num_kv_heads // num_parts,
            kv_layer_bytes=tuple(size // num_parts for size in self.kv_layer_bytes),
            kv_heads=tuple((heads // num_parts, *sizes) for heads, *sizes in self.kv_heads),
        )

    def gather_tables(self, min_bytes: int = 0) -> "ModelShape":
        """Returns the shape for passes that read the rows of embedding tables which they look up, and no others: such
        tables of at least `min_bytes` are in `Stage.tables`."""
        stages = list[Stage]()
        for stage in self.stages:
            tables = tuple(p for p in stage.parameters if p.rows_per_token and p.num_bytes >= min_bytes)
            kept = tuple(p for p in stage.parameters if p not in tables)
            stages.append(replace(stage, parameters=kept, tables=tables) if tables else stage)
        return replace(self, stages=tuple(stages))

    @cached_property
    def tables(self) -> tuple[Parameter, ...]:
        """The embedding tables of which passes read single rows."""
        return tuple(table for stage in self.stages for table in stage.tables)

    @cached_property
    def sizes(self) -> StageSizes:
        return StageSizes(self.stages)

    @property
    def has_experts(self) -> bool:
        return any(stage.num_experts for stage in self.stages)

    @cached_property
    def has_grouped_experts(self) -> bool:
        """True if experts run in model/expert_groups.py, which can batch the tokens of several lanes."""
        return any(p.is_experts for stage in self.layers for p in stage.parameters)

    @cached_property
    def expert_inner_size(self) -> int:
        """The largest intermediate size of one expert."""
        return max((inner_size(stage, self.hidden_size) for stage in self.stages), default=0) or self.intermediate_size

    @cached_property
    def num_whole_experts(self) -> int:
        """The largest number of whole experts of a layer on this rank; 0 if each rank has some rows of every expert."""
        return max((p.shape[0] for stage in self.layers for p in stage.parameters if p.num_experts), default=0)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(self.kv_layer_bytes)

    @cached_property
    def layers(self) -> tuple[Stage, ...]:
        return self.stages_of_kind(StageKind.layer)

    def stages_of_kind(self, kind: StageKind) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.kind is kind)

    @cached_property
    def has_encoder(self) -> bool:
        return bool(self.stages_of_kind(StageKind.encoder))

    @cached_property
    def own_stages(self) -> range:
        """The stages that this rank computes."""
        return self.rank_stages if self.rank_stages is not None else range(len(self.stages))

    @property
    def first_decode_stage(self) -> int:
        """The index of the first stage of a decode pass. An encoder runs in prefill passes only."""
        return self.stages_of_kind(StageKind.bridge)[0].index if self.has_encoder else self.own_stages.start
