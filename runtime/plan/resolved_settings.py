"""The settings of a run with all `auto` values replaced by the plan's choices, for the log and the run's record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..batching.prefixes import SharingRule, num_spared
from ..config.settings import Admission, Attention, FeedForward, KVDType, KVTier, RuntimeConfig, SharePrefixes
from ..units import format_count
from .placement.defaults import chunk_tokens
from .placement.memory import PAGE_TOKENS
from .planner import RunPlan
from .search.drafts import draft_obstacle
from .shape.dtypes import Loss, WeightStorage
from .shape.model import ModelShape


def prefix_sharing_obstacle(config: RuntimeConfig, shape: ModelShape, *, has_rope_lengths: bool) -> str | None:
    """Returns the reason why prompts cannot share prefixes in the KV cache; None if they can.

    `has_rope_lengths`: rotary embeddings, and so the cached keys, depend on the prompt length.
    """
    if config.policy.share_prefixes is SharePrefixes.off:
        return "policy.share_prefixes=off"
    if not shape.is_packed:
        return "this model runs in padded lanes, without KV pages"
    if has_rope_lengths:
        return "this model's rotary embeddings depend on the prompt length"
    return None


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings:
    """Resolved settings as plain values for JSON, mostly config values. `str` returns a few lines for the log.

    A lane is a micro-batch. A stage is the weights of one decoder layer, of the embeddings, or of the head.
    """

    dtype: str
    weights: str  # tier of the weights, as in the setting `offload`
    num_stages: int
    num_resident_stages: int
    num_host_stages: int  # streamed from host memory to the device, never read from disk
    prefetch: str
    prefetch_depth: int  # stages read ahead of compute; the block size for block prefetch, 0 without prefetch
    num_slots: int  # buffers in compute memory into which stages are read
    expert_paging: str
    num_paged_stages: int  # stages with experts that are read one by one
    num_kept_experts: int  # experts of these stages that stay in compute memory
    feedforward: str  # cpu: the CPU computes some experts in host memory
    kv: str  # tier of the KV cache
    num_kv_layers: int
    num_travelling_layers: int  # layers with KV outside of compute memory
    schedule: str
    attention: str
    admission: str
    num_blocks: int
    num_lanes: int
    lane_size: int  # maximum sequences of a micro-batch
    prefill_chunk_tokens: int  # maximum per micro-batch and pass
    sharing: str = ""  # scope of prefix sharing: block, run (continuous admission), micro-batch, or off
    why_unshared: str | None = None  # reason why prompts share no prefixes
    draft_tokens: int = 0  # most tokens that are guessed per sequence and decode pass
    draft_model: str | None = None  # name of the small model that guesses them
    why_no_drafts: str | None = None  # reason why none are guessed
    num_spared_tokens: int = 0  # prompt tokens saved by prefix sharing; an upper bound with continuous admission
    kv_dtype: str = KVDType.auto.value
    kv_loss: str = Loss.exact.value  # a value of `Loss`
    weight_formats: Sequence[str] = ()
    weight_loss: str = Loss.exact.value  # a value of `Loss`
    weight_error: float | None = None  # relative RMS error of rounded weights; None: unknown, or nothing is rounded

    @staticmethod
    def from_plan(
        config: RuntimeConfig,
        shape: ModelShape,
        plan: RunPlan,
        *,
        dtype: str,
        stored: WeightStorage,
        has_rope_lengths: bool = False,
    ) -> "ResolvedSettings":
        placement, walk, rule = plan.placement, plan.placement.decode_walk, plan.placement.sharing_rule
        is_wave = plan.policy.admission is Admission.wave
        why = prefix_sharing_obstacle(config, shape, has_rope_lengths=has_rope_lengths)
        why_no_drafts = draft_obstacle(config, shape, has_rope_lengths=has_rope_lengths)
        members, spared_rule = [block.micro_batches for block in plan.blocks], rule
        if not is_wave:
            # Upper bound: counts each prefix once per run, as if it stayed cached from its first use to its last.
            members = [[[i for block in plan.blocks for i in block.members]]]
            spared_rule = SharingRule(among_lanes=True, page_tokens=PAGE_TOKENS)
        attention = Attention.cpu if walk.cpu_attention else Attention.device
        scope = "micro-batch"
        if rule.among_lanes:
            scope = "block" if is_wave else "run"
        kv = placement.kv.tier if placement.kv.page_bytes else KVTier.device
        return ResolvedSettings(
            dtype=dtype,
            weights=config.offload.tier.value,
            num_stages=len(shape.stages),
            num_resident_stages=len(placement.resident),
            num_host_stages=len(placement.walk.in_host),
            prefetch=plan.prefetch.kind.value,
            prefetch_depth=walk.block if walk.block > 1 else max(0, walk.num_slots - walk.order.style.num_open),
            num_slots=placement.walk.num_slots,
            expert_paging=placement.paging.value,
            num_paged_stages=len(placement.paged),
            num_kept_experts=placement.num_kept_experts,
            feedforward=(FeedForward.cpu if placement.cpu_expert_stages else FeedForward.device).value,
            kv=kv.value,
            num_kv_layers=sum(1 for size in shape.kv_layer_bytes if size),
            num_travelling_layers=len(placement.kv.page_bytes),
            schedule=walk.order.value,
            attention=attention.value,
            admission=config.policy.admission.value,
            num_blocks=len(plan.blocks),
            num_lanes=plan.num_lanes,
            lane_size=plan.lane_size,
            prefill_chunk_tokens=chunk_tokens(plan.policy),
            sharing="off" if why else scope,
            why_unshared=why,
            draft_tokens=0 if why_no_drafts else plan.policy.draft_tokens or 0,
            draft_model=None if shape.draft is None else shape.draft.name,
            why_no_drafts=why_no_drafts,
            num_spared_tokens=0 if why else num_spared(members, plan.prefixes, spared_rule),
            kv_dtype=shape.kv_dtype.value,
            kv_loss=(Loss.exact if shape.kv_dtype is KVDType.auto else Loss.lossy).value,
            weight_formats=stored.formats,
            weight_loss=stored.loss.value,
            weight_error=stored.relative_error,
        )

    @property
    def headline(self) -> str:
        """Blocks and weights: `3 blocks of up to 64 rows; 4 of 10 stages resident, others from disk`."""
        weights = "all weights resident"
        if self.num_kept_experts:
            weights = f"{self.num_resident_stages} of {self.num_stages} stages and {self.num_kept_experts:,} experts "
            weights += "resident, others from disk"
        elif self.num_resident_stages != self.num_stages:
            num_disk_stages = self.num_stages - self.num_resident_stages - self.num_host_stages
            sources = ["host memory"] * bool(self.num_host_stages) + ["disk"] * bool(num_disk_stages)
            weights = f"{self.num_resident_stages} of {self.num_stages} stages resident"
            weights += f", others from {' and '.join(sources)}"
        blocks = format_count(self.num_blocks, "block")
        return f"{blocks} of up to {format_count(self.num_lanes * self.lane_size, 'row')}; {weights}"

    def __str__(self) -> str:
        each = ", each" if self.num_blocks > 1 else ""
        lanes = "1 micro-batch" if self.num_lanes == 1 else f"{self.num_lanes} micro-batches"
        size = format_count(self.lane_size, "sequence")
        streaming = ": all in compute memory, read once"
        if self.num_resident_stages != self.num_stages:
            in_host = f", {self.num_host_stages} in host memory" if self.num_host_stages else ""
            streaming = (
                f": {self.num_resident_stages} of {self.num_stages} stages resident{in_host}, {self.num_slots} slots, "
                f"prefetch={self.prefetch} {self.prefetch_depth} ahead"
            )
        paging = f" in {self.num_paged_stages} stages" if self.num_paged_stages else ""
        if self.num_kept_experts:
            paging += f", {self.num_kept_experts:,} experts resident"
        if paging and self.feedforward == FeedForward.cpu.value:
            paging += ", some computed on the CPU"
        kv = f"{self.kv}: {self.num_travelling_layers} of {self.num_kv_layers} layers, the others in compute memory"
        return "\n".join(
            [
                "plan:",
                f"  blocks    {format_count(self.num_blocks, 'block')}{each} of up to {lanes} of {size}, "
                f"admission={self.admission}, {self.dtype}",
                f"  prefill   chunks of up to {self.prefill_chunk_tokens:,} tokens per micro-batch",
                f"  prefixes  {self._sharing}",
                f"  drafts    {self._drafts}",
                f"  schedule  {self.schedule}, decode attention={self.attention}",
                f"  weights   {self.weights}{streaming}",
                f"  experts   paging={self.expert_paging}{paging}",
                f"  KV        {kv if self.num_travelling_layers else self.kv}",
                f"  precision weights {self.weights_text}; KV {self.kv_text}",
            ]
        )

    @property
    def _drafts(self) -> str:
        if self.draft_tokens:
            by = "" if self.draft_model is None else f", also by {self.draft_model}"
            return f"up to {format_count(self.draft_tokens, 'token')} of each sequence guessed per decode pass{by}"
        return f"none: {self.why_no_drafts or 'decode passes have no time or memory to spare'}"

    @property
    def _sharing(self) -> str:
        if self.why_unshared:
            return f"not shared: {self.why_unshared}"
        scope = "over the run" if self.sharing == "run" else f"within each {self.sharing}"
        if not self.num_spared_tokens:
            return f"shared {scope}: no common prefixes known"
        most = "up to " if self.admission == Admission.continuous.value else ""
        return f"shared {scope}: saves {most}{self.num_spared_tokens:,} prompt tokens"

    @property
    def numbers(self) -> Mapping[str, str | float | Sequence[str] | None]:
        """Storage formats of weights and KV cache with their error classes, for the record of a finished run."""
        keys = ("weight_formats", "weight_loss", "weight_error", "kv_dtype", "kv_loss")
        return {key: getattr(self, key) for key in keys}

    @property
    def weights_text(self) -> str:
        loss = Loss(self.weight_loss)
        return str(WeightStorage(formats=tuple(self.weight_formats), loss=loss, relative_error=self.weight_error))

    @property
    def kv_text(self) -> str:
        return f"{'compute dtype' if self.kv_dtype == KVDType.auto.value else self.kv_dtype}: {self.kv_loss}"
