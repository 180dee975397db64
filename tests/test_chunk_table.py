"""What the table of chunks and lanes shows: no machine is slower for them."""

import pytest

from runtime.config.settings import PolicyConfig, Tier
from tests.chunk_table import BEFORE, MACHINES, RESIDENT, planned
from tests.dealt import with_slow_others


@pytest.mark.slow("test_chunk_table.py::test_what_stays_on_a_device_is_launched_in_one_lane")
@pytest.mark.parametrize("name", with_slow_others(MACHINES, ["rtx4090"]))
def test_weights_from_the_disk_come_in_for_fewer_and_larger_chunks(name: str) -> None:
    before, after = (planned(name, "mixtral", Tier.nvme, policy) for policy in (BEFORE, PolicyConfig()))
    assert before is not None
    assert after is not None
    assert after.prediction.prefill_seconds < 0.5 * before.prediction.prefill_seconds
    assert after.prediction.seconds < 0.9 * before.prediction.seconds


@pytest.mark.parametrize(("name", "model"), RESIDENT)
def test_what_stays_on_a_device_is_launched_in_one_lane(name: str, model: str) -> None:
    before, after = (planned(name, model, Tier.none, policy) for policy in (BEFORE, PolicyConfig()))
    assert before is not None
    assert after is not None
    assert (before.run.num_lanes, after.run.num_lanes) == (4, 1)
    assert after.prediction.decode_seconds < 0.6 * before.prediction.decode_seconds
