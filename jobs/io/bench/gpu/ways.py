"""What `suite=gpu` compares: Millrace's ways over a model that the device cannot hold, what a user could pick instead,
and both over a model of so few layers that it can."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.config import Attention, Order, Tier

MICRO_BATCHES = 4  # of a whole block


@dataclass(frozen=True, kw_only=True)
class Way:
    """`kind`: millrace, accelerate, transformers or deepspeed. `part`: of all prompts, one in so many. `is_cut`: of the
    model, so many layers as the device holds."""

    name: str
    kind: str = "millrace"
    tier: Tier = Tier.cpu
    order: Order = Order.zigzag
    attention: Attention = Attention.device
    part: int = 1
    is_cut: bool = False

    @property
    def is_peer(self) -> bool:
        return self.kind != "millrace"


WAYS: Sequence[Way] = (
    Way(name="millrace"),
    Way(name="millrace, a quarter of the block", part=4),
    Way(name="millrace, attention=cpu", order=Order.cgopipe, attention=Attention.cpu),
    Way(name="millrace, module_batched", order=Order.module_batched),
    Way(name="accelerate cpu_offload", kind="accelerate"),
    Way(name="millrace in the device", tier=Tier.none, is_cut=True),
    Way(name="transformers in the device", kind="transformers", is_cut=True),
)
ALONE = Way(name="deepspeed ZeRO-Inference", kind="deepspeed")  # keeps a copy of its own: in a process of its own
