"""The policy of a run: the values that a policy search chooses."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum

from ...config.orders import Order
from ...config.settings import Attention, FeedForward, KVTier, PolicyKind, RuntimeConfig
from ...units import format_count


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The policy of MoE-Lightning (N, mu, A, F, r_w, r_c), plus the compute order. N is `num_sequences`."""

    micro_batch_size: int  # mu
    num_micro_batches: int  # per block
    attention: Attention  # A: the processor of decode attention
    schedule: Order
    resident_layers: int  # r_w: number of layers with weights in compute memory
    kv_fraction: float  # r_c: share of layers with KV in compute memory
    feedforward: FeedForward = FeedForward.device  # F: with `cpu`, the CPU computes some of the experts in host memory
    prefill_chunk_tokens: int | None = None  # per micro-batch and pass; None: the plan decides

    @property
    def num_sequences(self) -> int:
        """The number of sequences in a block."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def variant(self) -> tuple[Order, Attention, float, FeedForward]:
        """The policy without block size and resident layers."""
        return self.schedule, self.attention, self.kv_fraction, self.feedforward

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_plain()).encode()).hexdigest()[:12]

    @property
    def without_plan(self) -> "Policy":
        """The policy without the values that a plan chooses by itself: resident layers and prefill chunk."""
        return replace(self, resident_layers=0, prefill_chunk_tokens=None)

    def __str__(self) -> str:
        chunk = self.prefill_chunk_tokens
        experts = "" if self.feedforward is FeedForward.device else "some experts on the CPU, "
        chunks = "" if chunk is None else f", prefill chunks of {chunk:,} tokens"
        return (
            f"{self.num_micro_batches} x {self.micro_batch_size} sequences, {self.schedule.value}, "
            f"attention on {self.attention.value}, {experts}{format_count(self.resident_layers, 'resident layer')}, "
            f"KV of {self.kv_fraction:.0%} of the layers in compute memory{chunks}"
        )

    def to_plain(self) -> dict[str, object]:
        """Returns values for JSON. Omits defaults that were added later, so that older policies keep their digests."""
        values = {key: value.value if isinstance(value, Enum) else value for key, value in asdict(self).items()}
        if self.feedforward is FeedForward.device:
            del values["feedforward"]
        return {key: value for key, value in values.items() if value is not None}

    @staticmethod
    def from_plain(values: Mapping[str, object]) -> "Policy":
        """Inverse of `to_plain`. Raises KeyError, TypeError or ValueError for invalid `values`."""
        return Policy(
            micro_batch_size=int(str(values["micro_batch_size"])),
            num_micro_batches=int(str(values["num_micro_batches"])),
            attention=Attention(values["attention"]),
            schedule=Order(values["schedule"]),
            resident_layers=int(str(values["resident_layers"])),
            kv_fraction=float(str(values["kv_fraction"])),
            feedforward=FeedForward(values.get("feedforward", FeedForward.device.value)),
            prefill_chunk_tokens=int(str(chunk)) if (chunk := values.get("prefill_chunk_tokens")) is not None else None,
        )

    def apply(self, config: RuntimeConfig, *, has_device: bool) -> RuntimeConfig:
        """Returns `config` with this policy as a fixed policy.

        Resident layers are not fixed: the placement keeps as many as fit.
        """
        policy = replace(
            config.policy,
            kind=PolicyKind.fixed,
            micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.num_micro_batches,
            attention=self.attention,
            schedule=self.schedule,
            feedforward=config.policy.feedforward or self.feedforward,
            prefill_chunk_tokens=config.policy.prefill_chunk_tokens or self.prefill_chunk_tokens,
            pin=None,
        )
        kv = config.kv
        if has_device and self.attention is Attention.cpu:
            kv = replace(kv, tier=KVTier.cpu)
        elif self.kv_fraction == 1:
            kv = replace(kv, tier=KVTier.device)
        else:
            tier = kv.tier if kv.tier is not KVTier.auto else KVTier.cpu if has_device else KVTier.nvme
            kv = replace(kv, tier=tier, device_fraction=self.kv_fraction)
        return replace(config, policy=policy, kv=kv)

    def halve(self, num_halvings: int) -> "Policy":
        """Returns the policy after `num_halvings` out-of-memory errors, each of which halves block and chunk.

        A block gets fewer micro-batches. Only if it has a single one already, that gets smaller.
        """
        num_lanes, chunk = self.num_micro_batches >> num_halvings, self.prefill_chunk_tokens
        smaller = replace(self, prefill_chunk_tokens=None if chunk is None else max(1, chunk >> num_halvings))
        if num_lanes:
            return replace(smaller, num_micro_batches=num_lanes)
        return replace(smaller, num_micro_batches=1, micro_batch_size=max(1, self.micro_batch_size >> num_halvings))
