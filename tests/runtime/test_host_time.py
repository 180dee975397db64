"""What a decode pass costs the host in front of a device, counted over the whole engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from runtime import Runtime, SamplingConfig
from runtime.config.settings import KVConfig, KVTier, Order, PolicyConfig, PolicyKind, RuntimeConfig, Tier
from runtime.engine.records import PassRecord, Phase
from runtime.sequences import sampler as sampling_module
from runtime.sequences.sequence import Completion
from tests.device_operators import operators_of_a_device
from tests.host_counters import CountedDevice, counting
from tests.host_counts import HostCounts
from tests.runtime.sampling_support import request_of
from tests.runtime.test_fidelity import config_for
from tests.support import Reference, in_float32
from tests.turn_time import attend_at_once, called_functions, turn_and_pass

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


@dataclass(frozen=True)
class Decoded:
    """`passes`: of each decode pass but the first and the last, which make and drop what others keep."""

    passes: list[HostCounts]
    tokens: list[list[int]]


def decode(config: RuntimeConfig, ref: Reference, temperatures: Sequence[float | None] = (None,)) -> Decoded:
    found: list[tuple[PassRecord, HostCounts]] = []
    with operators_of_a_device(), counting() as counter:
        runtime = Runtime(config, device=CountedDevice((False, True)))
        asked = zip(ref.prompts, cycle(temperatures), strict=False)
        requests = [request_of(runtime, str(i), p, temperature=t) for i, (p, t) in enumerate(asked)]
        completions: dict[int, Completion] = {}
        with runtime.open_with_backoff(requests) as (plan, session):
            counter.take()
            for block in plan.blocks:
                done = session.run(block, requests, lambda record: found.append((record, counter.take())))
                completions |= dict(zip(block.members, done, strict=True))
    decoding = [counts for record, counts in found if record.phase is Phase.decode]
    assert len(decoding) > 2
    return Decoded(decoding[1:-1], [list(completions[i].token_ids) for i in range(len(requests))])


@pytest.fixture(scope="module")
def decoded(reference: References, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Order, KVTier], Decoded]:
    """Of weights that are stored as they are computed with, as a device's are."""

    @cache
    def stored(family: str) -> Reference:
        return in_float32(reference(family), tmp_path_factory.mktemp("float32"))

    return cache(lambda family, order, kv: decode(config_of(stored(family), order, kv), stored(family)))


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", TIERS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_decode_pass_waits_for_the_device_once_for_all_its_tokens(
    family: str, kv: KVTier, order: Order, reference: References, decoded: Callable[[str, Order, KVTier], Decoded]
) -> None:
    found = decoded(family, order, kv)
    assert found.tokens == reference(family).expected
    for counts in found.passes:
        [(what, times)] = counts.syncs.items()
        assert "runtime/engine/engine.py" in what, "behind the one copy of tokens"
        assert times == 1


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_keys_and_values_take_two_batches_of_copies_a_layer_and_lane(
    family: str, order: Order, decoded: Callable[[str, Order, KVTier], Decoded]
) -> None:
    """One there and one back. Of memory copies they hold four at most here: a lane's pages lie side by side, and
    soon those that it has open too."""
    num_visits = NUM_LANES * NUM_LAYERS
    for counts in decoded(family, order, KVTier.cpu).passes:
        carried = [batch for batch in counts.batches if "stream/kv.py" in batch[0].where]
        assert len(carried) == 2 * num_visits
        assert sum(batch[0].is_down for batch in carried) == num_visits
        assert sum(map(len, carried)) <= 4 * num_visits


SAMPLING: dict[str, dict[str, Any]] = {
    "draws": {
        "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "epsilon_cutoff": 1e-4,
        "logprobs": 3, "renormalize_logits": True,
    },
    "penalties and bans": {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "sequence_bias": [[[7], 2.0]], "suppress_tokens": [5, 6],
        "bad_words_ids": [[8, 9]], "begin_suppress_tokens": [4], "min_new_tokens": 3, "min_length": 30,
        "exponential_decay_length_penalty": [2, 1.1], "forced_eos_token_id": 3,
    },
}  # fmt: skip


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("settings", SAMPLING)
def test_whatever_is_asked_of_sampling_a_pass_waits_once(
    settings: str, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slices of two rows, and with rows of another temperature among them."""
    monkeypatch.setattr(sampling_module, "SLICE_BYTES", 2 * 640 * 4)
    ref = reference("llama")
    sampling = SamplingConfig(max_new_tokens=5, **SAMPLING[settings])
    config = config_of(ref, Order.zigzag, KVTier.device, sampling)
    for counts in decode(config, ref, temperatures=[None, 1.3, 0.0]).passes:
        assert list(counts.syncs.values()) == [1], counts.syncs


MOST_CALLS = {"llama": 102, "mixtral": 162}  # 119 and 175 before what is the same for all layers was kept


@pytest.mark.slow("runtime/test_host_time.py::test_a_decode_pass_waits_for_the_device_once_for_all_its_tokens")
@pytest.mark.parametrize("family", MOST_CALLS)
def test_a_lanes_turn_through_a_layer_calls_few_functions_of_ours(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all weights stay on the device the host's Python is what binds. `python -m tests.turn_time` says how long
    the calls take."""
    attend_at_once(monkeypatch)
    turn, _ = turn_and_pass(family, tmp_path, repeats=1)
    assert called_functions(turn) <= MOST_CALLS[family], sorted(turn.items(), key=lambda each: -each[1].calls)
