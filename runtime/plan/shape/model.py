"""Model sizes that determine memory and time: plain values, no torch. All planning is computed from these."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from ...config.settings import KVDType
from .attention import AttentionMethod, DeltaRule
from .shapes import Stage, StageKind, inner_size
from .stage_sizes import StageSizes


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model. `*_bytes_per_token`: per position, over all layers."""

    name: str
    stages: tuple[Stage, ...]
    hidden_size: int
    intermediate_size: int  # widest feed-forward activation per token; for experts at least that of one
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    kv_layer_bytes: tuple[int, ...]  # per position and decoder layer; 0 without a KV cache
    compute_dtype_bytes: int
    is_packed: bool  # lanes run without padding
    state_bytes_per_sequence: int = 0  # recurrent layers
    state_layer_bytes: tuple[int, ...] = ()  # the same per decoder layer, if known
    expanded_kv_width: int = 0  # elements per position after expanding latents (MLA), during attention
    cross_kv_bytes_per_token: int = 0  # per encoder position, over all decoder layers
    score_heads: int = 0  # heads with prefill scores in memory at a time, without a fused kernel
    bounded_layers: frozenset[int] = frozenset()  # padded lanes: layers with a sliding-window cache in transformers
    restart_tokens: int | None = None  # sequence length at which all keys are recomputed (LongRoPE)
    has_decode_kernel: bool = False  # CPU decode attention with scores in the processor's cache
    attention_method: AttentionMethod = AttentionMethod.host  # packed lanes, on the compute device
    has_fused_gates: bool = False  # feed-forward in token blocks, with the gate product in place
    has_whole_prompts: bool = False  # padded lanes without chunked prefill
    has_bare_experts: bool = False  # experts run in model/expert_groups.py and have no biases
    delta_rule: DeltaRule | None = None  # layers with a gated delta net
    kv_dtype: KVDType = KVDType.auto  # storage of the KV cache, see dtypes.py
    kv_heads: tuple[tuple[int, int, int], ...] = ()  # per decoder layer: KV heads, key size, value size
    kv_tail_bytes_per_sequence: int = 0  # unquantized newest page of all layers
    rank_stages: range | None = None  # stages computed by this pipeline rank, see rank_shares.py; None: all
    compute_dtype: str = ""  # safetensors name; "": unknown
    num_parts: int = 1  # tensor-parallel ranks; this shape is one rank's part
    weight_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        slices = {piece.name: piece.num_bytes for s in self.stages for p in s.parameters for piece in p.slices}
        object.__setattr__(self, "weight_bytes", sum(slices.values()))

    def with_head_share(self, num_parts: int) -> "ModelShape":
        """Returns the shape of one of `num_parts` ranks that divide the heads; `stages` already belong to this rank."""
        return replace(
            self,
            num_parts=num_parts,
            num_heads=self.num_heads // num_parts,
            num_kv_heads=self.num_kv_heads // num_parts,
            kv_layer_bytes=tuple(size // num_parts for size in self.kv_layer_bytes),
            kv_heads=tuple((heads // num_parts, *sizes) for heads, *sizes in self.kv_heads),
        )

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
        """The most experts of a layer that this rank alone holds; 0 if all ranks hold rows of every expert."""
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
        return self.rank_stages if self.rank_stages is not None else range(len(self.stages))

    @property
    def first_decode_stage(self) -> int:
        """The first stage of a decode pass: an encoder runs in the prefill pass only."""
        return self.stages_of_kind(StageKind.bridge)[0].index if self.has_encoder else self.own_stages.start
