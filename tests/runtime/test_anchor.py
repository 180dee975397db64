"""With anchored rates a layer takes each profiled lane as long as it took it."""

from dataclasses import replace

import pytest

from runtime.plan.cost.calibration import LayerSeconds, fit_rates, with_overheads
from runtime.plan.cost.lane_work import LaneWork
from runtime.plan.cost.rates import UNLIMITED, MachineRates
from runtime.plan.cost.work import stage_works
from tests.toy import toy_shape

SHAPE = toy_shape()
WORK = stage_works(SHAPE, frozenset())[1]
RATES = MachineRates(
    disk_bytes_per_second=1e9,
    gemm_flops_per_second={1: 1e6, 8: 4e6, 64: 8e6},
    memory_bytes_per_second=1e9,
    attention_bytes_per_second=1e9,
    cpu_attention_bytes_per_second=1e9,
    prefill_attention_flops_per_second=1e9,
    turn_seconds=1e-6,
)
DECODE = LaneWork(num_tokens=8, num_rows=8, kv_positions=80)
PROMPTS = LaneWork(num_tokens=64, num_rows=2, prefill_pairs=1056)


def products(rates: MachineRates, lane: LaneWork) -> float:
    return 2.0 * lane.num_tokens * WORK.dense_weights / rates.gemm_rate(lane.num_tokens)


def inside(rates: MachineRates, lane: LaneWork) -> float:
    streamed = lane.num_tokens * WORK.token_bytes / rates.memory_bytes_per_second
    return products(rates, lane) + streamed + rates.turn_seconds


def took(lane: LaneWork, factor: float, attention: float = 0.0) -> LayerSeconds:
    rest = inside(RATES, lane) - products(RATES, lane)
    return LayerSeconds(before=0.0, inside=rest + factor * products(RATES, lane), attention=attention)


def test_each_profiled_lane_takes_what_it_took() -> None:
    passes = [(DECODE, took(DECODE, 1.5)), (PROMPTS, took(PROMPTS, 1.2))]
    rates = fit_rates(RATES, SHAPE, WORK, passes)
    for lane, seconds in passes:
        assert inside(rates, lane) == pytest.approx(seconds.inside)


def test_between_profiled_rows_rates_change_by_their_distance_and_beyond_as_at_the_last() -> None:
    rates = MachineRates(disk_bytes_per_second=1e9, gemm_flops_per_second=dict.fromkeys((1, 8, 36, 64, 128), 8e6))
    slow = [(lane, LayerSeconds(before=0.0, inside=f * products(rates, lane), attention=0.0)) for lane, f in
            ((DECODE, 2.0), (PROMPTS, 1.0))]  # fmt: skip
    found = fit_rates(rates, SHAPE, WORK, slow).gemm_flops_per_second
    assert found == pytest.approx({1: 4e6, 8: 4e6, 36: 6e6, 64: 8e6, 128: 8e6})


def test_a_rate_changes_by_a_factor_of_two_at_most() -> None:
    rates = fit_rates(RATES, SHAPE, WORK, [(DECODE, took(DECODE, 10.0))])
    assert rates.gemm_flops_per_second[8] == RATES.gemm_flops_per_second[8] / 2


def test_attention_gets_the_rate_that_it_had() -> None:
    passes = [(DECODE, took(DECODE, 1.0, attention=0.25)), (PROMPTS, took(PROMPTS, 1.0, attention=0.5))]
    rates = fit_rates(RATES, SHAPE, WORK, passes)
    assert rates.attention_bytes_per_second == rates.cpu_attention_bytes_per_second == 80 * WORK.kv_bytes / 0.25
    assert rates.prefill_attention_flops_per_second == 4.0 * SHAPE.num_heads * SHAPE.head_dim * 1056 / 0.5


def test_the_cpu_beside_an_accelerator_keeps_its_own_rate() -> None:
    beside = replace(RATES, link_in_bytes_per_second=1e10)
    assert RATES.link_in_bytes_per_second == UNLIMITED
    rates = fit_rates(beside, SHAPE, WORK, [(DECODE, took(DECODE, 1.0, attention=0.25))])
    assert rates.cpu_attention_bytes_per_second == 1e9
    assert rates.attention_bytes_per_second == 80 * WORK.kv_bytes / 0.25


def test_a_layer_that_is_nearly_all_something_else_leaves_products_alone() -> None:
    seconds = LayerSeconds(before=0.0, inside=inside(RATES, DECODE) - 0.9 * products(RATES, DECODE), attention=0.0)
    slow = replace(RATES, turn_seconds=0.95 * seconds.inside)
    assert fit_rates(slow, SHAPE, WORK, [(DECODE, seconds)]) == slow


def test_a_turn_is_what_products_do_not_explain() -> None:
    single = LayerSeconds(before=0.125, inside=2.0 * WORK.dense_weights / 1e6 + 0.5, attention=0.75)
    rates = with_overheads(RATES, WORK, single)
    assert (rates.turn_seconds, rates.pass_seconds) == (pytest.approx(0.5), 0.125)
