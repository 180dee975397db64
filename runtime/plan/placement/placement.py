"""Where each stage's weights and each layer's keys and values live, how many slots the others pass through, and what
that takes of each memory; and where it is too much, which config keys can make the run fit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...batching.prefixes import SharingRule
from ...config.settings import ExpertPaging, KVTier, RuntimeConfig
from ...units import GIB
from ..schedule.walk import Walk
from .dequantized import DequantizedSize
from .feedforward import CpuShare
from .kv import ExchangeSize, KVLayout
from .ledger import PINNED_SHARE, Entry, Ledger
from .memory import PAGE_TOKENS


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that a run may use. `device_bytes` is None where compute happens in host memory; `library_bytes` of them
    are what the device's libraries take. Weights that stay in host memory are those of `num_sharers` processes, each of
    which counts its share of them; or the host's budget is that of `num_copies` processes together, each of which has
    them, and slots, by itself, and the device's that of `num_devices`, of which each has all that of weights."""

    host_bytes: int
    device_bytes: int | None = None
    library_bytes: int = 0
    num_sharers: int = 1
    num_copies: int = 1
    num_devices: int = 1

    @property
    def has_device(self) -> bool:
        return self.device_bytes is not None

    @property
    def compute_bytes(self) -> int:
        """The bytes of the memory where compute finds its weights."""
        return self.host_bytes if self.device_bytes is None else self.device_bytes

    def count_per_process(self, entry: Entry) -> Entry:
        """What of memory that each process has by itself counts here."""
        return _multiply_entry(entry, self.num_copies, "processes")

    def count_per_device(self, entry: Entry) -> Entry:
        """What of memory where compute finds its weights counts, that each process has by itself."""
        return _multiply_entry(entry, self.num_devices, "devices") if self.has_device else self.count_per_process(entry)

    def count_shared(self, entry: Entry) -> Entry:
        """What of weights that stay in host memory counts here."""
        if self.num_sharers == 1:
            return self.count_per_process(entry)
        num_bytes, equation = self.shared_bytes(entry.num_bytes), f"{entry.equation}, of {self.num_sharers} processes"
        return replace(entry, num_bytes=num_bytes, equation=equation)

    def shared_bytes(self, num_bytes: int) -> int:
        return -(-num_bytes * self.num_copies // self.num_sharers)


def _multiply_entry(entry: Entry, count: int, what: str) -> Entry:
    if count == 1:
        return entry
    return replace(entry, num_bytes=entry.num_bytes * count, equation=f"{entry.equation}, in each of {count} {what}")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`resident` stages stay in compute memory; the others follow `walk`, or in decode passes `decode_walk`, through
    slots of `slot_bytes`. Of `paged` stages, all streamed, only the dense part follows the walk; their experts have
    `num_expert_slots` of their own; `cpu_share` says which of those in host memory the CPU multiplies, None: none.
    `host_layers` keep their KV in host memory, where the CPU attends to it, through
    `exchange`."""

    resident: frozenset[int]
    walk: Walk
    decode_walk: Walk
    slot_bytes: int
    ledgers: tuple[Ledger, ...]
    kv: KVLayout
    exchange: ExchangeSize
    paged: frozenset[int] = frozenset()
    paging: ExpertPaging = ExpertPaging.off
    num_expert_slots: int = 0
    cpu_share: CpuShare | None = None
    dequantized: DequantizedSize | None = None  # None: stored weights are dequantized inside of each product
    keys_at_minimum: frozenset[str] = frozenset()  # keys of which no lower value helps

    @property
    def host_layers(self) -> frozenset[int]:
        return frozenset(self.kv.page_bytes) if self.kv.stays_in_host else frozenset()

    @property
    def sharing_rule(self) -> SharingRule:
        """How far prompts share what they begin with. Lanes that keep keys and values in host memory have no copy of a
        page there, nor anybody's in the pass that computes them; those that travel come to one lane at a time. Of
        quantised pages whole ones are shared: what is in none yet is the lane's that computed it."""
        in_host = self.kv.stays_in_host
        among_lanes, by_page = in_host or not self.kv.page_bytes, in_host or self.kv.is_quantized
        return SharingRule(among_lanes=among_lanes, in_pass=not in_host, page_tokens=PAGE_TOKENS if by_page else 1)

    @property
    def cpu_expert_stages(self) -> frozenset[int]:
        """The stages some of whose experts the CPU multiplies."""
        return frozenset() if self.cpu_share is None else self.paged & self.walk.in_host

    @property
    def is_fully_resident(self) -> bool:
        """Neither weights nor keys and values travel."""
        return not (self.walk.streamed or self.kv.page_bytes)

    @property
    def has_device(self) -> bool:
        """Compute has a memory of its own."""
        return any(ledger.memory == "device" for ledger in self.ledgers)

    @property
    def fits(self) -> bool:
        return all(ledger.fits for ledger in self.ledgers)

    def require_fit(self, config: RuntimeConfig | None = None) -> None:
        """Raises BudgetError, with the equation and the keys that can make it true."""
        for ledger in self.ledgers:
            advice = fit_advice(ledger, self.walk, self.kv, config or RuntimeConfig(), self.keys_at_minimum)
            if self.has_device and ledger.memory == "host" and config and config.offload.host_memory_gib is None:
                advice += f". Unset, {ledger.budget_key} is {PINNED_SHARE:.0%} of the host's memory at most, all pinned"
            ledger.require_fit(advice)


KV_TERMS = frozenset({"KV cache", "KV pages"})
SLOT_TERMS = frozenset({"KV slots", "KV staging"})
LANE_TERMS = frozenset({"states", "KV tails", "hidden states", "delta rule", "activations", "logits", "KV exchange"})
LOWERED_BY = {  # which terms a lower value of the key makes smaller
    "policy.micro_batch_size": LANE_TERMS | KV_TERMS | SLOT_TERMS,
    "policy.num_micro_batches": frozenset({"states", "KV tails", "hidden states", *KV_TERMS}),
    "policy.prefill_chunk_tokens": frozenset({"hidden states", "activations"}),
    "sampling.max_new_tokens": KV_TERMS | SLOT_TERMS,
    "kv.num_slots": SLOT_TERMS,
}


def fit_advice(ledger: Ledger, walk: Walk, kv: KVLayout, config: RuntimeConfig, keys_at_minimum: frozenset[str]) -> str:
    """The ways to make a run fit, by the terms that the ledger has, and the budget that this plan takes. A key whose
    value is at its end already is not named. Weights that are rounded while they are read cannot be read from disk in
    each pass."""
    terms = frozenset(entry.name for entry in ledger.entries if entry.num_bytes)
    options = [f"raise {ledger.budget_key} to {math.ceil(1000 * ledger.total_bytes / GIB) / 1000:g}"]
    lower = [key for key, lowered in LOWERED_BY.items() if terms & lowered and key not in keys_at_minimum]
    if "slots" in terms and walk.num_slots > 1:
        lower.append("prefetch.depth" if walk.block == 1 else "prefetch.block_layers")
    if "resident weights" in terms and walk.streamed:
        lower.append("offload.resident_layers")
    if "KV cache" in terms and kv.tier is KVTier.nvme:
        lower.append("kv.device_fraction")
    use, model = list[str](), config.model
    if "weights" in terms or ("resident weights" in terms and not walk.streamed):
        rounded = f" with weights that are rounded once, as model.quantize keeps all it has read ({model.pack_command})"
        use.append("offload=nvme" + (rounded if model.quantize is not None else ""))
    if "recordings" in terms:
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
