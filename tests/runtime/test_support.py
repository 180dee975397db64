"""The support table tells what the code does with each family, and is silent on none."""

import pytest
import transformers

from jobs.planning.support import FamilyCapabilities
from runtime.config.settings import Lanes
from runtime.model.capabilities import CacheKind, ExpertKind
from runtime.model.families import FAMILIES, Family
from tests.dealt import with_slow_others
from tests.support import KINDS_OF_ATTENTION


@pytest.mark.dealt(most=8)
@pytest.mark.parametrize("name", with_slow_others(FAMILIES, KINDS_OF_ATTENTION))
def test_lanes_are_packed_or_there_is_a_reason(name: str) -> None:
    row = FamilyCapabilities.from_family(FAMILIES[name])
    assert (row.name, row.model_type) == (name, FAMILIES[name].model_type)
    assert (row.lanes is Lanes.packed) == (row.note == "")
    assert (row.lanes is None) == (row.experts is None) == (row.cache is None)


@pytest.mark.dealt(most=4)
@pytest.mark.parametrize(
    ("name", "lanes", "experts", "cache"),
    [
        ("llama", Lanes.packed, ExpertKind.none, CacheKind.kv),
        ("mistral", Lanes.packed, ExpertKind.none, CacheKind.sliding),
        ("mixtral", Lanes.packed, ExpertKind.sorted, CacheKind.kv),
        ("deepseek-v3", Lanes.packed, ExpertKind.sorted, CacheKind.latent),
        ("deepseek-moe 16b", Lanes.packed, ExpertKind.sorted, CacheKind.kv),
        ("dbrx", Lanes.packed, ExpertKind.own, CacheKind.kv),
        ("longcat-flash", Lanes.packed, ExpertKind.own, CacheKind.latent),
        ("bloom", Lanes.padded, ExpertKind.none, CacheKind.kv),
        ("qwen3-next", Lanes.padded, ExpertKind.sorted, CacheKind.hybrid),
        ("t5", Lanes.padded, ExpertKind.none, CacheKind.kv),
        ("mamba-2", Lanes.padded, ExpertKind.none, CacheKind.recurrent),
    ],
)
def test_kinds_are_read_off_the_class(name: str, lanes: Lanes, experts: ExpertKind, cache: CacheKind) -> None:
    row = FamilyCapabilities.from_family(FAMILIES[name])
    assert (row.lanes, row.experts, row.cache) == (lanes, experts, cache)


def test_a_family_that_transformers_lacks_has_a_row_that_says_so() -> None:
    assert FamilyCapabilities.from_family(Family(name="new", model_type="nowhere")) == FamilyCapabilities(
        name="new",
        model_type="nowhere",
        lanes=None,
        experts=None,
        cache=None,
        note=f"not in transformers {transformers.__version__}",
    )
