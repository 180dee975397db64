"""What several prompts begin with is computed once, and says the same as if each were computed by itself."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from runtime import PolicyConfig, Runtime
from runtime.config import Attention, KVConfig, KVTier, Order, PolicyKind, Tier
from runtime.model.families import FAMILIES
from tests.fake_device import FakeDevice
from tests.runtime.sharing_support import Alike, run_alike, unshared
from tests.runtime.test_fidelity import config_for
from tests.support import Reference

References = Callable[[str], Reference]


@pytest.fixture(scope="session")
def alike(reference: References, shared_home: Path) -> Callable[[str], Alike]:
    return cache(lambda family: Alike.shared(reference(family).directory, shared_home / "alike" / family))


def policy(**settings: object) -> PolicyConfig:
    return PolicyConfig(kind=PolicyKind.fixed, **{"micro_batch_size": 4, "num_micro_batches": 3, **settings})


@pytest.mark.parametrize("family", FAMILIES)
def test_sharing_changes_no_token_in_any_family(
    family: str, alike: Callable[[str], Alike], reference: References
) -> None:
    runtime = Runtime(replace(config_for(reference(family), tier=Tier.none), policy=policy()))
    if runtime.model.rope_lengths is not None or not runtime.model.shape.is_packed:
        pytest.skip(f"{family} shares nothing")
    of = alike(family)
    ran = run_alike(runtime, of.prompts)
    assert ran.tokens == of.expected
    assert ran.num_computed < sum(map(len, of.prompts)) * 0.7
    assert ran.num_pages_left == 0
