"""A run of continuous admission in outline takes what the run played pass by pass takes."""

import random
from collections.abc import Callable, Sequence

import pytest

from runtime.batching.admission import AdmissionLimits
from runtime.batching.prefixes import SharedPrefix
from runtime.plan.cost import mixed_passes as played
from runtime.plan.cost.lane_work import PassGroup
from runtime.plan.cost.mixed_passes import mixed_passes, sample_passes
from runtime.plan.placement.memory import PAGE_TOKENS, SequenceSize


def limits(num_lanes: int, lane_size: int, lane_tokens: int) -> AdmissionLimits:
    return AdmissionLimits(
        num_lanes=num_lanes, lane_size=lane_size, lane_tokens=lane_tokens, page_tokens=PAGE_TOKENS
    )  # fmt: skip


def drawn(count: int, num_prompt: range, num_new: range) -> list[SequenceSize]:
    draw = random.Random(3)
    return [SequenceSize.interned(draw.choice(num_prompt), draw.choice(num_new)) for _ in range(count)]


def totals(passes: Sequence[PassGroup]) -> list[float]:
    """Passes, and in all of them tokens, those of prompts, logits, positions looked at and pages held."""

    def total(what: Callable[[PassGroup], float]) -> float:
        return sum(each.num_passes * what(each) for each in passes)

    def tokens(each: PassGroup) -> int:
        return sum(lane.num_tokens for lane in each.lanes)

    return [
        total(lambda each: 1),
        total(tokens),
        total(lambda each: each.prefill_share * tokens(each)),
        total(lambda each: sum(lane.num_rows for lane in each.lanes)),
        total(lambda each: sum(lane.kv_positions for lane in each.lanes)),
        total(lambda each: sum(lane.held_pages for lane in each.lanes)),
    ]


@pytest.mark.parametrize(
    ("sizes", "slots", "num_pages"),
    [
        (drawn(600, range(20, 120), range(24, 25)), limits(8, 32, 96), 10_000),
        (drawn(600, range(20, 120), range(24, 25)), limits(8, 32, 96), 700),
        (drawn(900, range(10, 400), range(1, 60)), limits(6, 24, 64), 2000),
        (drawn(900, range(10, 400), range(1, 60)), limits(1, 64, 128), 900),
    ],
    ids=["room for all", "pages are short", "answers differ", "one lane"],
)
def test_an_outline_takes_as_much_as_the_run(
    monkeypatch: pytest.MonkeyPatch, sizes: list[SequenceSize], slots: AdmissionLimits, num_pages: int
) -> None:
    for name, value in {"MAX_STEPS": 6000, "MAX_SLOTS": 64, "MAX_GROUPS": 32}.items():
        monkeypatch.setattr(played, name, value)
    outline, every = sample_passes(sizes, slots, num_pages), mixed_passes(sizes, slots, num_pages)
    assert len(outline) <= 32 < len(every)
    assert totals(outline) == pytest.approx(totals(every), rel=0.1)


def test_the_outline_of_a_short_run_is_the_run() -> None:
    prefix = SharedPrefix(num_tokens=64)
    for sizes in (drawn(40, range(20, 120), range(1, 9)), [SequenceSize.interned(90, 5).with_prefix(prefix)] * 20):
        assert sample_passes(sizes, limits(2, 8, 64), 200) == mixed_passes(sizes, limits(2, 8, 64), 200)


def test_prompts_that_share_are_played_in_all_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lanes have in common is computed once, however many lanes there are."""
    monkeypatch.setattr(played, "MAX_SLOTS", 4)
    prefix = SharedPrefix(num_tokens=64)
    sizes = [size.with_prefix(prefix) for size in drawn(64, range(80, 120), range(8, 9))]
    outline = sample_passes(sizes, limits(8, 4, 64), 2000)
    assert outline == mixed_passes(sizes, limits(8, 4, 64), 2000)
