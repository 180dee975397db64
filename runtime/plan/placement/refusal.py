"""Which config keys can make a run fit that was refused."""

from collections.abc import Iterator, Sequence

from ...config import KVTier
from ..schedule.walk import Walk
from .kv import KVLayout
from .ledger import Ledger

KV_TERMS = frozenset({"KV cache", "KV pages"})
SLOT_TERMS = frozenset({"KV slots", "KV staging"})
LOWERED_BY = {  # which terms a lower value of the key makes smaller
    "policy.micro_batch_size": frozenset(
        {"states", "hidden states", "delta rule", "activations", "logits", "KV exchange", *KV_TERMS, *SLOT_TERMS}
    ),
    "policy.num_micro_batches": frozenset({"states", "hidden states", *KV_TERMS}),
    "policy.prefill_chunk_tokens": frozenset({"hidden states", "activations"}),
    "sampling.max_new_tokens": KV_TERMS | SLOT_TERMS,
    "kv.num_slots": SLOT_TERMS,
}


def ways_to_fit(ledger: Ledger, walk: Walk, kv: KVLayout) -> str:
    """By the terms that the ledger has. A key whose value is at its end already is not named."""
    terms = frozenset(entry.name for entry in ledger.entries if entry.num_bytes)
    ways = [f"raise {ledger.budget_key}"]
    if lower := [key for key, lowered in LOWERED_BY.items() if terms & lowered] + [*_to_lower(terms, walk, kv)]:
        ways.append(f"lower {_one_of(lower)}")
    if use := [*_to_use(terms, walk, kv)]:
        ways.append(f"use {_one_of(use)}")
    return ", or ".join(ways)


def _to_lower(terms: frozenset[str], walk: Walk, kv: KVLayout) -> Iterator[str]:
    if "slots" in terms and walk.num_slots > 1:
        yield "prefetch.depth" if walk.block == 1 else "prefetch.block_layers"
    if "resident weights" in terms and walk.streamed:
        yield "offload.resident_layers"
    if "KV cache" in terms and kv.tier is KVTier.nvme:
        yield "kv.device_fraction"


def _to_use(terms: frozenset[str], walk: Walk, kv: KVLayout) -> Iterator[str]:
    if "weights" in terms or ("resident weights" in terms and not walk.streamed):
        yield "offload=nvme"
    if terms & KV_TERMS and kv.tier is not KVTier.nvme:
        yield "policy.attention=device with kv=nvme" if kv.stays_in_host else "kv=nvme"


def _one_of(keys: Sequence[str]) -> str:
    return " or ".join([", ".join(keys[:-1]), keys[-1]]) if len(keys) > 1 else keys[0]
