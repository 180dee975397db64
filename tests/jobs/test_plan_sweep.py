"""A sweep: what is varied, that each row is a plan of its own, where a block ends, and which files are left."""

import csv
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from jobs.pictures.trace_file import read_trace
from jobs.planning.plan_files import HEAD, SweepRow, draw_sweep, run_sweep, write_timeline
from jobs.planning.planning import make_plan
from jobs.planning.sweep import Axis, SweepPoint, sweep, sweep_axes
from runtime.errors import ConfigError
from tests.jobs.test_plan import config_of, plan

SMALL = ("model=llama-3.2-1b", "machine=t4", "workload.num_requests=32", "policy=fixed", "policy.micro_batch_size=8")


def axes_of(*overrides: str) -> list[Axis]:
    config = config_of(*SMALL, *overrides)
    return sweep_axes(config, make_plan(config))


def swept(*overrides: str) -> list[SweepPoint]:
    return list(sweep(axes_of(*overrides)))


def totals(outcomes: list[SweepPoint]) -> list[float]:
    return [each.planned.throughput[2] or 0.0 for each in outcomes if each.planned is not None]


def test_memory_is_that_of_the_host_and_of_the_device_as_planned_and_around_it() -> None:
    host, device = axes_of("plan.sweep=memory", "offload.device_memory_gib=4", "offload.host_memory_gib=30")
    assert (host.name, host.base_value, device.name, device.base_value) == ("host memory", 30, "device memory", 4)
    assert all(
        axis.base_value in axis.values and min(axis.values) < axis.base_value < max(axis.values)
        for axis in (host, device)
    )


def test_each_row_has_the_budget_that_it_says() -> None:
    outcomes = swept("plan.sweep=memory", "plan.sweep_points=[2,8]")
    budgets = [
        {ledger.memory: ledger.budget_bytes >> 30 for ledger in each.planned.run.placement.ledgers}[
            each.axis.name.split()[0]
        ]
        for each in outcomes
        if each.planned is not None
    ]
    fitting = [each.value for each in outcomes if each.planned is not None]
    assert budgets == fitting
    assert len(outcomes) == 4


def test_what_does_not_fit_is_a_row_with_the_reason() -> None:
    refused = [SweepRow.from_point(each) for each in swept("plan.sweep=memory", "plan.sweep_points=[0.02]")]
    assert [row.fits for row in refused] == [False, False]
    assert all("memory" in row.refusal and row.num_sequences is None for row in refused)


def test_a_faster_road_is_never_slower() -> None:
    outcomes = swept("plan.sweep=bandwidth", "offload.resident_layers=0", "plan.sweep_points=[2,8,32]")
    assert {each.axis.name for each in outcomes} == {"link bandwidth"}
    rates = totals(outcomes)
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_a_plan_that_moves_nothing_has_no_bandwidth_to_vary() -> None:
    with pytest.raises(ConfigError, match=r"moves nothing.*offload=cpu"):
        axes_of("plan.sweep=bandwidth")


@pytest.mark.slow("jobs/test_plan_sweep.py::test_a_table_and_two_pictures_are_left")
def test_longer_prompts_keep_their_distribution_and_end_with_the_models_context() -> None:
    [axis] = axes_of("plan.sweep=prompt", "plan.sweep_points=[20,60]")
    found = [axis.plan(value) for value in axis.values]
    assert [each.num_prompt_tokens / len(each.sizes) for each in found] == pytest.approx([20, 60], rel=0.1)
    config = config_of("model=gpt2", "plan.sweep=prompt")
    [axis] = sweep_axes(config, make_plan(config))
    assert max(axis.values) * 418 / 77 <= 1024 - 32


def test_a_block_grows_to_the_largest_that_fits() -> None:
    outcomes = swept("plan.sweep=batch", "kv=device", "offload.device_memory_gib=2")
    *fitting, refused = outcomes
    assert refused.planned is None
    assert all(each.planned is not None for each in fitting)
    assert fitting[-1].value < refused.value <= 1.06 * fitting[-1].value + 1
    assert [SweepRow.from_point(each).num_sequences for each in fitting] == [each.value for each in fitting]
    assert {each.planned.run.lane_size <= 8 for each in fitting if each.planned is not None} == {True}


def test_rows_line_up_below_the_head() -> None:
    rows = [str(SweepRow.from_point(each)) for each in swept("plan.sweep=batch", "plan.sweep_points=[8,16]")]
    at = HEAD.index("attention")
    assert [row[at : at + 6] for row in rows] == ["device", "device"]


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("kind", ["memory", "batch", "prompt"])
def test_a_table_and_two_pictures_are_left(kind: str, tmp_path: Path) -> None:
    config = config_of(*SMALL, f"plan.sweep={kind}", "plan.sweep_points=[8,16]")
    lines = list(run_sweep(config, make_plan(config), tmp_path))
    with (tmp_path / f"{kind}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == (4 if kind == "memory" else 2)
    assert [line for line in lines if "P2" in line] == lines[1 + len(rows) :][-1:]
    assert float(rows[-1]["total_tokens_per_second"]) > 0
    for name in (f"{kind}.png", "roofline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_totals_are_in_the_picture_where_nothing_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heights: list[float] = []
    set_ylim = Axes.set_ylim

    def noted(axes: Axes, *limits: float, **options: object) -> object:
        heights.extend(limits[1:])
        return set_ylim(axes, *limits, **options)

    monkeypatch.setattr(Axes, "set_ylim", noted)
    outcomes = swept("plan.sweep=batch", "plan.sweep_points=[8,16]", "sampling.max_new_tokens=1")
    draw_sweep(tmp_path / "batch.png", outcomes, "one token each", {})
    assert heights[0] == pytest.approx(1.12 * max(totals(outcomes)))


def test_a_timeline_reads_back_like_the_trace_of_a_run(tmp_path: Path) -> None:
    which = write_timeline(plan(*SMALL, "offload.resident_layers=0"), tmp_path)
    assert which == "prefill pass 1 of 1 and decode passes 1 to 3 of 31 of the first block"
    traced = read_trace(tmp_path / "timeline.json")
    assert {"copy 1", "run 1.0"} <= {span.name for span in traced.spans}
    assert [each.name for each in traced.passes] == ["prefill pass", *(f"decode pass {i}" for i in (1, 2, 3))]
    assert '"stage": "layer 0"' in (tmp_path / "timeline.json").read_text()
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_knee_is_the_first_block_that_weights_do_not_bind(tmp_path: Path) -> None:
    config = config_of(*SMALL, "offload.resident_layers=0", "policy.micro_batch_size=64", "plan.sweep=batch")
    *rows, last, p2 = run_sweep(config, make_plan(config), tmp_path)
    bound = [row.split()[1] for row in rows[1:] if row.endswith("/ compute")]
    assert last == f"knee, weights no longer bind: {bound[0]} sequences"
    assert p2.startswith("P2 of feed-forward layers: ")


def test_formats_are_listed_with_their_bytes_and_what_they_do_to_numbers(tmp_path: Path) -> None:
    config = config_of(*SMALL, "offload=nvme", "offload.resident_layers=0", "plan.sweep=format")
    planned = make_plan(config)
    head, *lines = run_sweep(config, planned, tmp_path)
    with (tmp_path / "format.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert head == HEAD
    names = ["published", "lossless", "int8", "int4", "fp8"]
    assert [row["varied"] for row in rows] == [line.split()[0] for line in lines] == names
    published, lossless, int8, int4, fp8 = (float(row["value"]) for row in rows)
    assert published == pytest.approx(planned.shape.weight_bytes / 1e9)
    assert 0.75 <= lossless / published <= 0.755
    assert lossless > int8 == fp8 > int4
    classes = [row["note"].partition(": ")[2].partition(",")[0] for row in rows]
    assert classes == ["exact", "lossless", "lossy", "lossy", "lossy"]
    assert all("for model=tiny" in row["note"] for row in rows[2:])
    by_bytes = sorted(rows, key=lambda row: float(row["value"]))
    rates = [float(row["decode_tokens_per_second"]) for row in by_bytes]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]
    assert (tmp_path / "format.png").read_bytes().startswith(b"\x89PNG")


def test_formats_of_a_model_that_is_published_in_fewer_bytes_begin_with_that_and_with_plain_ones() -> None:
    config = config_of("model=gpt-oss-20b", "machine=h100", "policy=fixed", "plan.sweep=format")
    axes = sweep_axes(config, make_plan(config))
    assert [axis.name for axis in axes] == ["published", "bfloat16", "lossless", "int8", "int4", "fp8"]
    published, plain, lossless, *_ = (axis.values[0] for axis in axes)
    assert published < 0.4 * plain
    assert 0.75 <= lossless / plain <= 0.76


def test_a_plan_of_a_packed_store_is_that_of_the_sweep() -> None:
    published, lossless, *_ = [each.planned for each in swept("plan.sweep=format")]
    alone = plan(*SMALL, "plan.format=lossless")
    assert lossless is not None
    assert published is not None
    assert (alone.shape.weight_bytes, alone.throughput) == (lossless.shape.weight_bytes, lossless.throughput)
    assert "precision weights window4: lossless" in str(alone.resolved_settings)


def test_a_plan_counts_weights_that_are_rounded_while_they_are_read() -> None:
    """What is not rounded stays as published, where a store packs it without loss."""
    rounded = plan(*SMALL, "model.quantize=int8", "offload=cpu")
    stored, published = (plan(*SMALL, *more).shape.weight_bytes for more in (("plan.format=int8",), ()))
    assert stored < rounded.shape.weight_bytes < 0.7 * published
    with pytest.raises(ConfigError, match=r"plan\.format=int8 and model\.quantize=int4"):
        config_of("model.quantize=int4", "plan.format=int8")
    assert plan(*SMALL, "model.quantize=int8").shape == rounded.shape
    with pytest.raises(ConfigError, match=r"would quantize \d+ stages again in every pass.*weightstream pack"):
        plan(*SMALL, "model.quantize=int8", "offload=nvme", "offload.resident_layers=0")


def test_points_are_no_formats() -> None:
    with pytest.raises(ConfigError, match=r"plan\.sweep_points has no effect with plan\.sweep=format"):
        config_of(*SMALL, "plan.sweep=format", "plan.sweep_points=[1,2]")
