"""Choices are kept under what was asked, found again by it or by name, and searched anew when they no longer fit."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from runtime.config.settings import OffloadConfig, PolicyConfig, PolicyKind, PrefetchConfig, RuntimeConfig, Tier
from runtime.errors import BudgetError, ConfigError
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.placement import Budgets
from runtime.plan.planner import RunPlan, find_policy
from runtime.plan.search.candidate import Problem
from runtime.planning import policy_cache
from runtime.planning.policy_cache import plan_with_cached_policy, search_key
from runtime.units import GIB, MIB
from tests.toy import sizes_of, toy_shape

RATES = MachineRates(disk_bytes_per_second=1e9, gemm_flops_per_second={1: 1e9, 64: 1e11})
CONFIG = RuntimeConfig(offload=OffloadConfig(tier=Tier.nvme), policy=PolicyConfig(kind=PolicyKind.hrm))
SIZES = sizes_of([10 + n % 50 for n in range(60)])


@dataclass
class Planner:
    """Plans on a host with so much memory, and counts searches."""

    host_bytes: int = GIB
    num_searches: int = 0

    @property
    def budgets(self) -> Budgets:
        return Budgets(host_bytes=self.host_bytes)


def ask(directory: Path, planner: Planner, config: RuntimeConfig = CONFIG, key: str | None = "key") -> RunPlan:
    problem = Problem(shape=toy_shape(), config=config, budgets=planner.budgets, sizes=SIZES, rates=RATES)

    def counted(asked: Problem, **how: Any) -> RunPlan:
        planner.num_searches += 1
        return find_policy(asked, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_cache, "find_policy", counted)
        return plan_with_cached_policy(directory, key, problem)


def pinned(pin: str) -> RuntimeConfig:
    return replace(CONFIG, policy=replace(CONFIG.policy, pin=pin))


def test_the_same_question_is_searched_once(tmp_path: Path) -> None:
    planner = Planner()
    first, second = (ask(tmp_path / "cache", planner) for _ in range(2))
    assert planner.num_searches == 1
    assert first.choice is not None
    assert replace(first, choice=None) == second
    ask(tmp_path / "cache", planner, key="another")
    assert planner.num_searches == 2


def test_a_choice_that_no_longer_fits_is_searched_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ask(tmp_path, Planner())
    small = Planner(host_bytes=100 * MIB)
    found = ask(tmp_path, small)
    assert small.num_searches == 1
    assert found.placement.fits
    assert "no longer fits" in caplog.text


def test_a_pin_is_found_by_the_beginning_of_its_name_whatever_is_asked(tmp_path: Path) -> None:
    first = ask(tmp_path, Planner())
    assert first.choice is not None
    digest = first.choice.best.policy.digest
    planner = Planner()
    again = ask(tmp_path, planner, pinned(digest[:6]), key="something else")
    assert planner.num_searches == 0
    assert again.blocks == first.blocks
    with pytest.raises(BudgetError):
        ask(tmp_path, Planner(host_bytes=80 * MIB), pinned(digest))


def test_a_pin_that_names_nothing_is_refused_with_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without policy\.pin"):
        ask(tmp_path, Planner(), pinned("abc"))
    found = ask(tmp_path, Planner())
    assert found.choice is not None
    with pytest.raises(ConfigError, match=found.choice.best.policy.digest):
        ask(tmp_path, Planner(), pinned("no such"))


@pytest.mark.slow("runtime/test_choices.py::test_a_choice_that_no_longer_fits_is_searched_anew")
def test_a_damaged_choice_is_searched_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ask(tmp_path, Planner())
    for text in ("", "{}", '{"policy": {"attention": "moon"}, "why": []}'):
        (tmp_path / "key.json").write_text(text)
        planner = Planner()
        ask(tmp_path, planner)
        assert planner.num_searches == 1
    assert "ignoring invalid policy file" in caplog.text


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert ask(tmp_path / "file", Planner()).placement.fits
    assert "could not cache the policy" in caplog.text


def test_without_a_key_nothing_is_kept(tmp_path: Path) -> None:
    ask(tmp_path, Planner(), key=None)
    assert list(tmp_path.iterdir()) == []


def test_the_choice_is_logged_with_why_in_three_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        found, _ = ask(tmp_path, Planner()), ask(tmp_path, Planner())
    assert found.choice is not None
    for origin in ("searched", "from an earlier search"):
        said = [record.message for record in caplog.records if f"({origin}): " in record.message]
        assert said == [f"policy ({origin}): {sentence}" for sentence in found.choice.why[:3]]


def test_another_machine_model_workload_budget_or_setting_is_another_question() -> None:
    budgets, shape = Budgets(host_bytes=GIB), toy_shape()
    base = search_key("here", shape, CONFIG, budgets, SIZES)
    others = {
        search_key("there", shape, CONFIG, budgets, SIZES),
        search_key("here", toy_shape(num_layers=9), CONFIG, budgets, SIZES),
        search_key("here", shape, CONFIG, budgets, SIZES[1:]),
        search_key("here", shape, CONFIG, Budgets(host_bytes=2 * GIB), SIZES),
        search_key("here", shape, CONFIG, Budgets(host_bytes=GIB, device_bytes=GIB), SIZES),
        search_key("here", shape, replace(CONFIG, prefetch=PrefetchConfig(depth=2)), budgets, SIZES),
        search_key("here", shape, replace(CONFIG, policy=replace(CONFIG.policy, micro_batch_size=3)), budgets, SIZES),
    }
    assert len(others | {base}) == 8
    assert base == search_key("here", shape, pinned("abc"), Budgets(host_bytes=GIB + 1000), list(SIZES))
