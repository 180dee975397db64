"""What a search predicts for published settings; `python -m tests.published` prints all of them."""

import pytest

from runtime.plan.hrm import fitting, roofline_of
from runtime.plan.policy_grid import Choices
from tests.published import CONFIG, Setting, choose, machine_for, settings

MOST_OPTIMISTIC = 3.5  # times what was measured, as the paper's own model was
FOR_SEVERAL_DEVICES = 5.0  # what they exchange is not counted


def name(setting: Setting) -> str:
    return f"{setting.model.name}-{setting.machine}-{setting.task}-{setting.is_padded}"


@pytest.mark.parametrize("setting", list(settings()), ids=name)
def test_the_roofline_is_an_upper_bound_and_no_more_optimistic_than_the_papers_own(setting: Setting) -> None:
    shape, on, asked = setting.shape, machine_for(setting), setting.workload
    grid = Choices.of(shape, CONFIG, asked.num_requests, has_device=True).grid(asked.num_requests)
    seconds = roofline_of(shape, on, asked, CONFIG).seconds(fitting(shape, on, asked, CONFIG, grid))
    tokens_per_second = asked.num_new_tokens / float(seconds.min())
    most = MOST_OPTIMISTIC if on.num_devices == 1 else FOR_SEVERAL_DEVICES
    assert 1 < tokens_per_second / setting.moe_lightning < most


def test_a_published_setting_is_searched_through_to_plans_that_fit() -> None:
    setting = next(each for each in settings() if each.task == "MTBench 128")
    choice = choose(setting)
    assert choice.best.full_share <= 1
    assert choice.best.policy.num_sequences > 500
