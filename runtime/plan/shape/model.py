"""A model in the sizes that memory and time follow from: plain values, no torch. Everything planned is computed from
these.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from ...config.settings import KVDType
from .attention import AttentionMethod, DeltaRule
from .shapes import Stage, StageKind, inner_size
from .stage_sizes import StageSizes


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes that memory and time follow from. `*_bytes_per_token` are for one sequence position over all layers;
    `kv_layer_bytes` for each decoder layer by itself, 0 where it keeps no keys and values."""

    name: str
    stages: tuple[Stage, ...]
    hidden_size: int
    intermediate_size: int  # widest feed-forward activation of a token; of experts at least that of one
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    kv_layer_bytes: tuple[int, ...]
    compute_dtype_bytes: int
    is_packed: bool  # lanes without padding
    state_bytes_per_sequence: int = 0  # recurrent layers
    state_layer_bytes: tuple[int, ...] = ()  # the same by decoder layer, where that is known
    expanded_kv_width: int = 0  # elements that a layer makes of one position's latents (MLA), while it attends
    cross_kv_bytes_per_token: int = 0  # of one encoder position, which every decoder layer looks at
    score_heads: int = 0  # heads whose prefill scores lie in memory at a time, where no fused kernel can make them
    bounded_layers: frozenset[int] = frozenset()  # of padded lanes: decoder layers that transformers keeps a window of
    restart_tokens: int | None = None  # of a sequence, on which its keys are computed once more (LongRoPE)
    has_decode_kernel: bool = False  # decode attention that keeps its scores in the processor's cache
    attention_method: AttentionMethod = AttentionMethod.host  # of packed lanes, where the model computes
    has_fused_gates: bool = False  # feed-forwards take a few tokens at a time and multiply in place
    has_whole_prompts: bool = False  # padded lanes of which no prompt is prefilled in chunks
    has_bare_experts: bool = False  # that run through our function, and have matrices alone
    delta_rule: DeltaRule | None = None  # of layers with a gated delta net
    kv_dtype: KVDType = KVDType.auto  # how keys and values are kept, see dtypes.py
    kv_heads: tuple[tuple[int, int, int], ...] = ()  # of each decoder layer: KV heads, sizes of a key and of a value
    kv_tail_bytes_per_sequence: int = 0  # the newest page of all layers, as computed, beside quantised ones
    own: range | None = None  # the stages that this process computes, see rank_shares.py; None: all
    compute_dtype: str = ""  # as safetensors calls it; "": not known
    num_parts: int = 1  # ranks that compute each token together, of which this is one's part
    weight_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        slices = {piece.name: piece.num_bytes for s in self.stages for p in s.parameters for piece in p.slices}
        object.__setattr__(self, "weight_bytes", sum(slices.values()))

    def with_head_share(self, num_parts: int) -> "ModelShape":
        """That of one of so many ranks that share the heads of a model whose `stages` are this rank's already."""
        return replace(
            self,
            num_parts=num_parts,
            num_heads=self.num_heads // num_parts,
            num_kv_heads=self.num_kv_heads // num_parts,
            kv_layer_bytes=tuple(each // num_parts for each in self.kv_layer_bytes),
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
        """Whether experts of a layer run through our function, which alone can take the tokens of several lanes."""
        return any(p.is_experts for stage in self.layers for p in stage.parameters)

    @cached_property
    def expert_inner_size(self) -> int:
        """The numbers between the matrices of one expert, at most."""
        return max((inner_size(stage, self.hidden_size) for stage in self.stages), default=0) or self.intermediate_size

    @cached_property
    def num_whole_experts(self) -> int:
        """The experts of a layer that this rank has and others have not, at most; 0 where all have rows of each."""
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
        """Those that this process computes."""
        return self.own if self.own is not None else range(len(self.stages))

    @property
    def first_decode_stage(self) -> int:
        """Where a decode pass begins: an encoder runs in the prefill pass alone."""
        return self.stages_of_kind(StageKind.bridge)[0].index if self.has_encoder else self.own_stages.start
