"""How requests are grouped where the config leaves it open: by the kind of lanes and by what computes.

Where the CPU computes, nothing travels that one lane could wait for while another is computed, and products with more
rows are faster: in decode, one packed lane of 256 gave 1.25 times the tokens of four of 64 (llama-3.2-1b's shape, two
cores with AVX-512). Padded lanes stay small, as all of a lane are as wide as its longest.
"""

from dataclasses import replace
from typing import NamedTuple

from ..config import PolicyConfig, RuntimeConfig


class Sizes(NamedTuple):
    """Sequences of a micro-batch, micro-batches of a block, and tokens of a micro-batch in one prefill pass."""

    micro_batch_size: int
    num_micro_batches: int
    chunk_tokens: int


SEVERAL_LANES, ONE_LANE = Sizes(64, 4, 512), Sizes(256, 1, 2048)


def sizes_of(policy: PolicyConfig, usual: Sizes = SEVERAL_LANES) -> Sizes:
    return Sizes(
        policy.micro_batch_size or usual.micro_batch_size,
        policy.num_micro_batches or usual.num_micro_batches,
        policy.prefill_chunk_tokens or usual.chunk_tokens,
    )


def with_usual_sizes(config: RuntimeConfig, *, is_packed: bool, has_device: bool) -> RuntimeConfig:
    """With a number for each size. A micro-batch whose size is given is taken to be one of several."""
    usual = ONE_LANE if is_packed and not has_device else SEVERAL_LANES
    if config.policy.micro_batch_size is not None:
        usual = usual._replace(num_micro_batches=SEVERAL_LANES.num_micro_batches)
    micro_batch_size, num_micro_batches, chunk_tokens = sizes_of(config.policy, usual)
    policy = replace(
        config.policy,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        prefill_chunk_tokens=chunk_tokens,
    )
    return replace(config, policy=policy)
