"""What a decode pass costs the host in front of a device, counted over the whole engine."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from runtime import Runtime, SamplingConfig
from runtime.config import KVConfig, KVTier, Order, PolicyConfig, PolicyKind, RuntimeConfig, Tier
from runtime.engine.records import PassRecord, Phase
from runtime.engine.sequence import Completion
from tests.device_operators import operators_of_a_device
from tests.host_counters import CountedDevice, counting
from tests.host_counts import HostCounts
from tests.runtime.test_fidelity import config_for
from tests.support import Reference

References = Callable[[str], Reference]
NUM_LANES, LANE_SIZE, NUM_LAYERS = 2, 4, 4
ORDERS = [Order.zigzag, Order.flexgen, Order.module_batched]
TIERS = [KVTier.device, KVTier.cpu]


def config_of(
    ref: Reference, order: Order, kv: KVTier, sampling: SamplingConfig | None = None, lanes: int = NUM_LANES
) -> RuntimeConfig:
    policy = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=LANE_SIZE, num_micro_batches=lanes, schedule=order)
    config = config_for(ref, tier=Tier.cpu, policy=policy, sampling=sampling)
    return replace(config, kv=KVConfig(tier=kv, device_fraction=0.0 if kv is KVTier.cpu else None))


def decode_counts(config: RuntimeConfig, ref: Reference) -> tuple[list[HostCounts], list[list[int]]]:
    """Of each decode pass but the first and the last, which make and drop what others keep; and the tokens."""
    found: list[tuple[PassRecord, HostCounts]] = []
    with operators_of_a_device(), counting() as counter:
        runtime = Runtime(config, device=CountedDevice((False, True)))
        requests = [runtime.request(str(i), prompt) for i, prompt in enumerate(ref.prompts)]
        completions: dict[int, Completion] = {}
        with runtime.confirmed_session(requests) as (plan, session):
            counter.take()
            for block in plan.blocks:
                done = session.run(block, requests, lambda record: found.append((record, counter.take())))
                completions |= dict(zip(block.members, done, strict=True))
    decoding = [counts for record, counts in found if record.phase is Phase.decode]
    return decoding[1:-1], [list(completions[i].token_ids) for i in range(len(requests))]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_keys_and_values_take_two_batches_of_copies_a_layer_and_lane(
    family: str, order: Order, reference: References
) -> None:
    """One there and one back. Of memory copies they hold four at most here: a lane's pages lie side by side, and
    soon those that it has open too."""
    ref = reference(family)
    passes, tokens = decode_counts(config_of(ref, order, KVTier.cpu), ref)
    assert tokens == ref.expected
    for counts in passes:
        carried = [batch for batch in counts.batches if "pinned_pages" in batch[0].where]
        num_visits = NUM_LANES * NUM_LAYERS
        assert len(carried) == 2 * num_visits
        assert sum(batch[0].is_down for batch in carried) == num_visits
        assert sum(map(len, carried)) <= 4 * num_visits
