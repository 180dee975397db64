"""What a search predicts for published settings; `python -m tests.deviations` prints all of them."""

from dataclasses import replace

import pytest

from runtime.plan.placement.defaults import CHUNK_TOKENS
from runtime.plan.search.grid import GridAxes
from runtime.plan.search.hrm import make_roofline, select_fitting
from tests.published import CONFIG, Setting, choose, machine_for, settings

MOST_OPTIMISTIC = (
    3.45  # times what was measured, by larger blocks than could be pinned; the paper's own model was at 3.5
)
LEAST = 0.7  # its host pins less memory for the same weights


def name(setting: Setting) -> str:
    return f"{setting.model.name}-{setting.machine}-{setting.task}-{setting.is_padded}"


@pytest.mark.dealt(most=4)
@pytest.mark.parametrize("setting", list(settings()), ids=name)
def test_the_best_roofline_is_near_what_was_measured_and_less_optimistic_than_the_papers_own(setting: Setting) -> None:
    shape, on, asked = setting.shape, machine_for(setting), setting.workload
    config = replace(CONFIG, policy=replace(CONFIG.policy, prefill_chunk_tokens=CHUNK_TOKENS))
    grid = GridAxes.from_config(shape, config, asked.num_requests, has_device=True).grid(asked.num_requests)
    seconds = make_roofline(shape, on, asked, config).seconds(select_fitting(shape, on, asked, config, grid))
    tokens_per_second = asked.num_new_tokens / float(seconds.min())
    assert LEAST < tokens_per_second / setting.moe_lightning < MOST_OPTIMISTIC


@pytest.mark.slow(
    "runtime/test_published.py::test_the_best_roofline_is_near_what_was_measured_and_less_optimistic_than_the_papers_own"
)
def test_a_published_setting_is_searched_through_to_plans_that_fit() -> None:
    setting = next(each for each in settings() if each.task == "MTBench 128")
    choice = choose(setting)
    assert choice.best.full_share <= 1
    assert choice.best.policy.num_sequences > 500
