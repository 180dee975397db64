"""What plans say that dequantizing takes of a device, against bytes and launches counted by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.planning.packed_shapes import shape_in_format
from jobs.planning.shapes import read_shape
from runtime.config.settings import (
    Attention,
    Dequantize,
    DType,
    ExpertPaging,
    KVConfig,
    KVTier,
    OffloadConfig,
    Order,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    Tier,
)
from runtime.errors import BudgetError
from runtime.linear import blocks as panels
from runtime.linear import packed_rows
from runtime.linear.stored import dequantize
from runtime.plan.cost.durations import make_durations
from runtime.plan.cost.lane_work import LaneWork
from runtime.plan.cost.machine import Machine
from runtime.plan.cost.rates import UNLIMITED, MachineRates
from runtime.plan.placement.load import Load
from runtime.plan.placement.memory import DEQUANTIZING_BYTES, MAX_DEQUANTIZED_ELEMENTS
from runtime.plan.placement.placement import Placement
from runtime.plan.placement.placer import choose_placement
from runtime.plan.search.grid import GridAxes
from runtime.plan.search.hrm import make_roofline
from runtime.plan.search.policy import Policy
from runtime.plan.search.workload import Workload
from runtime.plan.shape.model import ModelShape
from runtime.resources import Resource
from tests.live_bytes import LiveBytes
from tests.published import machine
from tests.runtime.stored_rows import CPU, MAKERS
from tests.toy import sizes_of

LAYER = 5
HIDDEN, HEADS, INNER = 8192, 2 * 8192 + 2 * 1024, 28672  # of Llama 3.3 70B: outputs of q, o, k and v together
NUMBERS = HIDDEN * (HEADS + 3 * INNER)
GPTQ_BYTES = NUMBERS / 2 + NUMBERS / 128 * 2.5  # 4 bits; a group of 128 has a factor of 16 bits and a zero point of 4
RATE, LAUNCH = 1e11, 1e-3
MANY, FEW = (
    LaneWork(num_tokens=rows, num_rows=rows, kv_positions=100 * rows, held_pages=8, changed_pages=rows)
    for rows in (128, 8)
)


def shape_of(name: str = "gptq", model: str = "llama-3.3-70b") -> ModelShape:
    return shape_in_format(read_shape(model, DType.bfloat16, is_plain=True), name)


def placed(shape: ModelShape, on: Machine, dequantize: Dequantize, size: int = 64) -> Placement:
    config = RuntimeConfig(
        offload=OffloadConfig(tier=Tier.cpu, dequantize=dequantize, expert_paging=ExpertPaging.off),
        kv=KVConfig(tier=KVTier.cpu),
        policy=PolicyConfig(kind=PolicyKind.fixed, attention=Attention.device),
    )
    return choose_placement(shape, config, on.budgets, Load.from_lanes(shape, [sizes_of([20] * size)] * 2, 512))


def turn(shape: ModelShape, dequantize: Dequantize, lanes: list[LaneWork], rates: MachineRates) -> float:
    """The seconds of the first lane's turn through a layer, in a decode pass."""
    placement = placed(shape, machine("a100-80"), dequantize, lanes[0].num_tokens)
    return make_durations(shape, placement, placement.decode_walk, lanes, rates).run(LAYER, 0)


@pytest.mark.parametrize(("dequantize", "sharers"), [(Dequantize.stage, 2), (Dequantize.product, 1)])
def test_many_rows_meet_numbers_that_lanes_share_or_make_each_for_themselves(
    dequantize: Dequantize, sharers: int
) -> None:
    rates = machine("a100-80").rates
    counted = replace(rates, dequantize_bytes_per_second=RATE, launch_seconds=LAUNCH)
    free = replace(rates, dequantize_bytes_per_second=UNLIMITED, launch_seconds=0.0)
    found = turn(shape_of(), dequantize, [MANY, MANY], counted) - turn(shape_of(), dequantize, [MANY, MANY], free)
    by_hand = (GPTQ_BYTES + 2 * NUMBERS) / RATE + 2 * 7 * LAUNCH
    assert found == pytest.approx(by_hand / sharers, rel=0.01)


def test_few_rows_take_with_codes_as_long_as_numbers_take_to_be_read() -> None:
    rates = replace(machine("a100-80").rates, dequantize_bytes_per_second=RATE)
    plain, stored = (turn(shape_of(name), Dequantize.stage, [FEW], rates) for name in ("bfloat16", "gptq"))
    products = rates.gemm_seconds(8, NUMBERS)
    assert stored - plain == pytest.approx(2 * NUMBERS / RATE - products, rel=0.01)


@pytest.mark.parametrize("rows", [MANY, FEW])
@pytest.mark.parametrize(
    ("model", "name"), [("llama-3.3-70b", "gptq"), ("llama-3.3-70b", "bfloat16"), ("mixtral", "gptq")]
)
def test_the_roofline_of_a_decode_pass_has_what_lanes_take_in_its_layers(model: str, name: str, rows: LaneWork) -> None:
    on, shape, count = machine("a100-80"), shape_of(name, model), 2
    workload = Workload.from_sizes(sizes_of([20] * count * rows.num_rows))
    policy = Policy(micro_batch_size=rows.num_rows, num_micro_batches=count, attention=Attention.device,
                    schedule=Order.zigzag, resident_layers=0, kv_fraction=1.0)  # fmt: skip
    grid = GridAxes(micro_batches=[rows.num_rows], counts=[count], resident=[0],
                   variants=[(Order.zigzag, Attention.device, 1.0)]).grid(
        count * rows.num_rows).single(policy)  # fmt: skip
    rates = replace(on.rates, attention_bytes_per_second=UNLIMITED, memory_bytes_per_second=UNLIMITED)
    free = replace(rates, dequantize_bytes_per_second=UNLIMITED, launch_seconds=0.0)
    config = RuntimeConfig(offload=OffloadConfig(tier=Tier.cpu, dequantize=Dequantize.stage))
    counted, uncounted = (
        make_roofline(shape, replace(on, rates=each), workload, config).decode_pass(grid).busy[Resource.compute][0]
        for each in (rates, free)
    )
    by_turns = [count * turn(shape, Dequantize.stage, [rows] * count, each) for each in (rates, free)]
    assert (counted - uncounted) / len(shape.layers) == pytest.approx(by_turns[0] - by_turns[1], rel=1e-3, abs=1e-9)


def test_few_rows_are_bound_by_products_where_those_take_longer_than_reading_codes() -> None:
    rates = replace(machine("a100-80").rates, dequantize_bytes_per_second=1e15)
    peak = max(rates.gemm_flops_per_second.values())
    plain, stored = (turn(shape_of(name), Dequantize.stage, [FEW], rates) for name in ("bfloat16", "gptq"))
    assert stored - plain == pytest.approx(2 * 8 * NUMBERS / peak - rates.gemm_seconds(8, NUMBERS), rel=0.01)


def test_plain_weights_of_the_compute_dtype_take_nothing() -> None:
    rates = machine("a100-80").rates
    slow = replace(rates, dequantize_bytes_per_second=1.0, launch_seconds=1.0)
    assert turn(shape_of("bfloat16"), Dequantize.auto, [MANY], slow) == turn(
        shape_of("bfloat16"), Dequantize.auto, [MANY], rates
    )


def test_a_card_without_units_for_bfloat16_dequantizes_what_is_published_in_it() -> None:
    in_float16 = read_shape("llama-3.1-8b", DType.float16)
    placement = placed(in_float16, machine("t4"), Dequantize.auto)
    assert placement.dequantized is not None
    in_bfloat16 = read_shape("llama-3.1-8b", DType.bfloat16)
    assert placed(in_bfloat16, machine("l4"), Dequantize.auto).dequantized is None


def test_the_ledger_has_an_area_for_a_layer_s_numbers_and_what_operators_make() -> None:
    placement = placed(shape_of(), machine("rtx4090"), Dequantize.stage)
    (entry,) = (entry for entry in placement.ledgers[0].entries if entry.name == "dequantized weights")
    assert entry.num_bytes == pytest.approx(2 * NUMBERS + DEQUANTIZING_BYTES, rel=1e-6)
    in_products = placed(shape_of(), machine("rtx4090"), Dequantize.product)
    assert len(in_products.resident) > len(placement.resident), "what the area takes"


def test_a_layer_that_has_no_room_as_numbers_is_dequantized_in_products_or_refused_with_that_advice() -> None:
    shape = read_shape("deepseek-v3", DType.bfloat16)  # 21.4 GiB a layer, 10.7 as stored
    on = replace(machine("a100-40"), host_bytes=2**40)
    assert placed(shape, on, Dequantize.auto, size=8).dequantized is None
    refused = placed(shape, on, Dequantize.stage, size=8)
    with pytest.raises(BudgetError, match=r"dequantized weights(?s:.*)or use .*offload\.dequantize=product"):
        refused.require_fit(RuntimeConfig())


@pytest.mark.parametrize("name", MAKERS)
def test_operators_take_no_more_on_the_way_than_the_ledger_counts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the area, of as many numbers as are dequantized at once."""
    monkeypatch.setattr(packed_rows, "has_compiler", lambda: False)
    rows = MAKERS[name]((256, 1024), tmp_path, CPU)
    out_1NK = torch.empty(1, *rows.shape, dtype=torch.bfloat16)
    dequantize(rows, out_1NK)  # tables are kept
    monkeypatch.setattr(panels, "_buffers", panels._Buffers())
    monkeypatch.setattr(panels, "PANEL_BYTES", 1)
    with LiveBytes([out_1NK]) as live:
        dequantize(rows, out_1NK)
    assert live.peak <= DEQUANTIZING_BYTES / MAX_DEQUANTIZED_ELEMENTS * out_1NK.numel()
