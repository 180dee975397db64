"""What `suite=gpu` compares: Millrace's ways over a model that the device cannot hold, what a user could pick instead,
and both over a model of so few layers that it can."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.config import Admission, Attention, Order, Tier

from .missing import is_there

MICRO_BATCHES = 4  # of a whole block
CHUNK_TOKENS = 8192  # of prompts per lane and pass: a pass brings all weights, so a lane's prompts go in one


@dataclass(frozen=True, kw_only=True)
class Way:
    """`kind`: millrace, accelerate, transformers or deepspeed. `part`: of all prompts, one in so many. `num_pieces`: in
    which a lane's prompts are prefilled. `is_cut`: of the model, so many layers as the device holds. `tier=nvme`: so
    few that writing them to disk takes seconds. `needs`: modules without which something else would be measured."""

    name: str
    kind: str = "millrace"
    tier: Tier = Tier.cpu
    order: Order = Order.zigzag
    attention: Attention = Attention.device
    admission: Admission = Admission.wave
    num_pieces: int = 1
    part: int = 1
    is_cut: bool = False
    needs: tuple[str, ...] = ()

    @property
    def is_peer(self) -> bool:
        return self.kind != "millrace"

    @property
    def missing(self) -> list[str]:
        return [module for module in self.needs if not is_there(module)]


WAYS: Sequence[Way] = (
    Way(name="millrace"),
    Way(name="millrace, a quarter of the block", part=4),
    Way(name="millrace, prompts in four pieces", num_pieces=4),
    Way(name="millrace, admission=continuous", admission=Admission.continuous, num_pieces=4),
    Way(name="millrace, attention=cpu", order=Order.cgopipe, attention=Attention.cpu, needs=("numba",)),
    Way(name="millrace, module_batched", order=Order.module_batched),
    Way(name="accelerate cpu_offload", kind="accelerate", needs=("accelerate",)),
    Way(name="millrace in the device", tier=Tier.none, is_cut=True),
    Way(name="transformers in the device", kind="transformers", is_cut=True),
    Way(name="millrace, offload=nvme", tier=Tier.nvme),
)
# Keeps a copy of its own, so in a process of its own.
ALONE = Way(name="deepspeed ZeRO-Inference", kind="deepspeed", needs=("deepspeed",))
