"""Placement of weights and KV cache with its ledgers (tables of memory use), and advice to make a run fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...batching.prefixes import SharingRule
from ...config.settings import ExpertPaging, KVTier, RuntimeConfig
from ...units import GIB
from ..schedule.walk import Walk
from .dequantized import DequantizedSize
from .experts import Routing
from .feedforward import CpuShare
from .kv import ExchangeSize, KVLayout
from .ledger import PINNED_SHARE, Entry, Ledger
from .memory import PAGE_TOKENS


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Memory budgets of a run in bytes.

    They are for one process, or for all processes together that compute a run on this machine.
    """

    host_bytes: int  # of `num_copies` processes together
    device_bytes: int | None = None  # of `num_devices` devices together; None: no device
    library_bytes: int = 0  # part of `device_bytes` for libraries such as cuBLAS
    num_sharers: int = 1  # processes that share the weights in host memory; each counts an equal part
    num_copies: int = 1  # processes counted here, each with its own slots
    num_devices: int = 1  # devices counted here, each with all resident weights

    @property
    def has_device(self) -> bool:
        return self.device_bytes is not None

    @property
    def compute_bytes(self) -> int:
        """The budget of the memory in which the model is computed."""
        return self.host_bytes if self.device_bytes is None else self.device_bytes

    def less_compute(self, num_bytes: int) -> "Budgets":
        """Returns these budgets with so many bytes less of the memory in which the model is computed."""
        if self.device_bytes is None:
            return replace(self, host_bytes=self.host_bytes - num_bytes)
        return replace(self, device_bytes=self.device_bytes - num_bytes)

    def count_per_process(self, entry: Entry) -> Entry:
        """Returns the entry for all processes, if each has a copy."""
        return _multiply_entry(entry, self.num_copies, "processes")

    def count_per_device(self, entry: Entry) -> Entry:
        """Returns an entry in compute memory for all devices, or without devices for all processes."""
        return _multiply_entry(entry, self.num_devices, "devices") if self.has_device else self.count_per_process(entry)

    def count_shared(self, entry: Entry) -> Entry:
        """Returns the part of an entry for weights in host memory, if several processes share these weights."""
        if self.num_sharers == 1:
            return self.count_per_process(entry)
        equation = f"{entry.equation}, shared by {self.num_sharers} processes"
        return replace(entry, num_bytes=self.shared_bytes(entry.num_bytes), equation=equation)

    def shared_bytes(self, num_bytes: int) -> int:
        return -(-num_bytes * self.num_copies // self.num_sharers)


def _multiply_entry(entry: Entry, count: int, owners: str) -> Entry:
    if count == 1:
        return entry
    return replace(entry, num_bytes=entry.num_bytes * count, equation=f"{entry.equation}, in each of {count} {owners}")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Placement of weights and KV cache for a run.

    A **walk** describes the path of a pass: stages, slots and transfers. A **slot** is a buffer into which streamed
    stages are read one after another.
    """

    resident: frozenset[int]  # stages that stay in compute memory, paged ones without experts; others are streamed
    walk: Walk  # of prefill passes
    decode_walk: Walk  # of decode passes
    slot_bytes: int
    ledgers: tuple[Ledger, ...]  # of device and host memory, or without a device of host memory
    kv: KVLayout
    exchange: ExchangeSize  # buffers for CPU attention in `host_layers`
    paged: frozenset[int] = frozenset()  # stages with experts that are read one by one
    paging: ExpertPaging = ExpertPaging.off
    num_expert_slots: int = 0  # slots for one expert each
    num_kept_experts: int = 0  # further slots, for experts that stay in compute memory
    routing: Routing | None = None  # measured hits of experts, for predictions; None: tokens visit all experts evenly
    cpu_share: CpuShare | None = None  # chooses experts in host memory that the CPU computes; None: no experts
    dequantized: DequantizedSize | None = None  # areas for whole dequantized stages; None: each product dequantizes
    keys_at_minimum: frozenset[str] = frozenset()  # config keys that cannot reduce memory further

    @property
    def host_layers(self) -> frozenset[int]:
        """The layers with KV in host memory, where the CPU computes their attention."""
        return frozenset(self.kv.page_bytes) if self.kv.stays_in_host else frozenset()

    @property
    def sharing_rule(self) -> SharingRule:
        """The prompts that may share prefixes in the KV cache.

        With KV in compute memory, all lanes (micro-batches) share prefixes. With KV that stays in host memory they
        share whole pages, but not in the pass that computes the prefix. Offloaded KV is loaded for each lane, and so
        shared within a lane only. Quantized pages are shared whole.
        """
        in_host = self.kv.stays_in_host
        among_lanes = in_host or not self.kv.page_bytes
        by_page = in_host or self.kv.is_quantized
        return SharingRule(among_lanes=among_lanes, in_pass=not in_host, page_tokens=PAGE_TOKENS if by_page else 1)

    @property
    def cpu_expert_stages(self) -> frozenset[int]:
        """The stages in which the CPU may compute some of the experts."""
        return frozenset() if self.cpu_share is None else self.paged & self.walk.in_host

    @property
    def is_fully_resident(self) -> bool:
        """True if neither weights nor KV are streamed."""
        return not (self.walk.streamed or self.paged or self.kv.page_bytes)

    @property
    def has_device(self) -> bool:
        """True if an accelerator computes, in a memory of its own."""
        return any(ledger.memory == "device" for ledger in self.ledgers)

    @property
    def compute_ledger(self) -> Ledger:
        """The ledger of the memory in which the model is computed."""
        return self.ledgers[0]

    @property
    def fits(self) -> bool:
        return all(ledger.fits for ledger in self.ledgers)

    def require_fit(self, config: RuntimeConfig | None = None) -> None:
        """Raises BudgetError if the run does not fit, with the ledger and settings that can make it fit."""
        for ledger in self.ledgers:
            advice = fit_advice(ledger, self.walk, self.kv, config or RuntimeConfig(), self.keys_at_minimum)
            if self.has_device and ledger.memory == "host" and config and config.offload.host_memory_gib is None:
                advice += f". Its default is at most {PINNED_SHARE:.0%} of host memory, as it is pinned"
            ledger.require_fit(advice)


# Names of ledger entries.
KV_TERMS = frozenset({"KV cache", "KV pages"})
SLOT_TERMS = frozenset({"KV slots", "KV staging"})
LANE_TERMS = frozenset({"states", "KV tails", "hidden states", "delta rule", "activations", "logits", "KV exchange"})
LOWERED_TERMS = {  # config key -> ledger entries that a lower value of the key reduces
    "policy.micro_batch_size": LANE_TERMS | KV_TERMS | SLOT_TERMS,
    "policy.num_micro_batches": frozenset({"states", "KV tails", "hidden states", *KV_TERMS}),
    "policy.prefill_chunk_tokens": frozenset({"hidden states", "activations"}),
    "sampling.max_new_tokens": KV_TERMS | SLOT_TERMS,
    "kv.num_slots": SLOT_TERMS,
}


def fit_advice(ledger: Ledger, walk: Walk, kv: KVLayout, config: RuntimeConfig, keys_at_minimum: frozenset[str]) -> str:
    """Returns a text with the config changes that can make a run fit, chosen by the entries of `ledger`."""
    terms = frozenset(entry.name for entry in ledger.entries if entry.num_bytes)
    options = [f"raise {ledger.budget_key} to {math.ceil(1000 * ledger.total_bytes / GIB) / 1000:g}"]
    lower = [key for key, lowered in LOWERED_TERMS.items() if terms & lowered and key not in keys_at_minimum]
    if "weight slots" in terms and walk.num_slots > 1:
        lower.append("prefetch.depth" if walk.block == 1 else "prefetch.block_layers")
    if "resident weights" in terms and walk.streamed:
        lower.append("offload.resident_layers")
    if "kept experts" in terms:
        lower.append("offload.kept_experts")
    if "KV cache" in terms and kv.tier is KVTier.nvme:
        lower.append("kv.device_fraction")
    use, model = list[str](), config.model
    # Settings to use instead: for each, an entry that it removes must exist.
    if "weights" in terms or ("resident weights" in terms and not walk.streamed):
        packed = f" with packed weights instead of model.quantize ({model.pack_command})"
        # Otherwise every pass would quantize the weights that it reads.
        use.append("offload=nvme" + (packed if model.quantize is not None else ""))
    if "CUDA graphs" in terms:
        use.append("model.graphs=false")
    if "dequantized weights" in terms:
        use.append("offload.dequantize=product")
    if terms & KV_TERMS and kv.tier is not KVTier.nvme:
        use.append("policy.attention=device with kv=nvme" if kv.stays_in_host else "kv=nvme")
    if lower:
        options.append(f"lower {_join_with_or(lower)}")
    if use:
        options.append(f"use {_join_with_or(use)}")
    return ", or ".join(options)


def _join_with_or(keys: Sequence[str]) -> str:
    return " or ".join([", ".join(keys[:-1]), keys[-1]]) if len(keys) > 1 else keys[0]
