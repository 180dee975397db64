import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.record.passes import PassRow, Status, mean_pass
from jobs.record.summary import BusyShares, Elapsed, ExpertUse, MemoryUse, Rates, summarize, write_summary
from jobs.run.summary_table import format_table
from runtime.plan.cost.predict import Prediction
from runtime.plan.cost.simulator import PhaseTime
from runtime.units import GIB, MIB

PREFILL = PassRow(
    pass_index=0,
    phase="prefill",
    num_sequences=4,
    real_tokens=1000,
    padded_tokens=1200,
    prompt_tokens=1000,
    issued_tokens=4,
    useful_tokens=4,
    seconds=2.0,
    compute_seconds=1.5,
    load_seconds=1.0,
    stall_seconds=0.5,
    bytes_read_disk=3 * GIB,
    bytes_copied_device=MIB,
    peak_host_bytes=5 * GIB,
    peak_device_bytes=GIB,
    host_bytes=GIB,
    started_at=100.0,
    since_start_seconds=3.0,
)
DECODE = replace(
    PREFILL,
    pass_index=1,
    phase="decode",
    real_tokens=4,
    padded_tokens=4,
    prompt_tokens=0,
    useful_tokens=3,
    seconds=0.5,
    peak_host_bytes=2 * GIB,
)
MIXED = replace(
    PREFILL, phase="mixed", real_tokens=40, padded_tokens=40, prompt_tokens=30, issued_tokens=12, useful_tokens=6
)  # ten rows decode, two end their prompts
ROWS: dict[Status, int] = {"ok": 3, "error": 1}


def test_rates_follow_the_papers_formulas() -> None:
    measured = summarize([PREFILL, DECODE, DECODE], rows=ROWS).measured
    assert measured == Rates(
        prefill=1000 / 2.0, decode_issued=8 / 1.0, decode_useful=6 / 1.0, total_issued=12 / 3.0, total_useful=10 / 3.0
    )


def test_a_mixed_pass_is_divided_by_what_it_computed() -> None:
    summary = summarize([MIXED], rows=ROWS)
    assert (summary.prompt_tokens, summary.padded_prompt_tokens) == (30, 30)
    assert (summary.prefill_seconds, summary.decode_seconds) == (1.5, 0.5)
    assert summary.measured == Rates(
        prefill=30 / 1.5, decode_issued=10 / 0.5, decode_useful=5 / 0.5, total_issued=12 / 2.0, total_useful=6 / 2.0
    )


def test_a_mixed_pass_of_one_kind_counts_as_a_pass_of_that_kind() -> None:
    same = [(PREFILL, replace(PREFILL, phase="mixed", padded_tokens=1000)), (DECODE, replace(DECODE, phase="mixed"))]
    for plain, mixed in same:
        assert summarize([mixed], rows={}) == summarize([replace(plain, padded_tokens=mixed.padded_tokens)], rows={})


def test_times_and_bytes_are_sums_and_memory_is_a_peak() -> None:
    summary = summarize([PREFILL, DECODE, DECODE], rows=ROWS)
    assert (summary.prefill_seconds, summary.decode_seconds, summary.stall_seconds) == (2.0, 1.0, 1.5)
    assert (summary.bytes_read_disk, summary.peak.host_bytes) == (9 * GIB, 5 * GIB)
    assert (summary.prompt_tokens, summary.padded_prompt_tokens) == (1000, 1200)
    assert summary.rows == {"ok": 3, "error": 1, "skipped": 0}


@pytest.mark.parametrize(
    ("passes", "missing"),
    [
        ([], {"prefill", "decode_issued", "decode_useful", "total_issued", "total_useful"}),
        ([PREFILL], {"decode_issued", "decode_useful"}),
        ([DECODE], {"prefill"}),
        ([replace(MIXED, prompt_tokens=40, issued_tokens=0, useful_tokens=0)], {"decode_issued", "decode_useful"}),
        (
            [replace(PREFILL, seconds=0.0)],
            {"prefill", "decode_issued", "decode_useful", "total_issued", "total_useful"},
        ),
    ],
)
def test_a_rate_without_time_is_missing_and_divides_by_nothing(passes: list[PassRow], missing: set[str]) -> None:
    summary = summarize(passes, rows={})
    assert {name for name, rate in vars(summary.measured).items() if rate is None} == missing
    assert "nan" not in format_table(summary)


def test_total_does_not_depend_on_how_passes_fall_into_parts() -> None:
    passes = [replace(DECODE, pass_index=i, seconds=0.1 * i) for i in range(5)]
    whole, shuffled = summarize(passes, rows={}), summarize(passes[3:] + passes[:3], rows={})
    assert whole.measured.total_issued == pytest.approx(shuffled.measured.total_issued)


def predicted(row: PassRow, seconds: float, stall_seconds: float = 0.0) -> PassRow:
    return replace(
        row, predicted_seconds=seconds, predicted_compute_seconds=0.4, predicted_load_seconds=1.1,
        predicted_copy_seconds=0.0, predicted_attention_seconds=0.0, predicted_stall_seconds=stall_seconds,
    )  # fmt: skip


def test_a_scored_run_says_so_of_its_tokens() -> None:
    summary = summarize([PREFILL], rows=ROWS)
    assert "generated tokens" in format_table(summary)
    scored = format_table(replace(summary, totals={"num_tokens": 3}))
    assert "scored tokens" in scored
    assert "generated" not in scored


def test_each_phase_has_its_predicted_seconds_beside_the_measured_ones() -> None:
    table = format_table(summarize([predicted(PREFILL, 3.0, 0.2), predicted(DECODE, 1.5)], rows=ROWS))
    lines = [line.split() for line in table.splitlines()]
    assert ["prefill", "time", "2", "s", "3", "s"] in lines
    assert ["prefill:", "stalled", "0.5", "s", "0.2", "s"] in lines
    assert ["disk", "busy", "80%", "49%"] in lines  # 2 of 2.5 s, and 2.2 of 4.5 s
    assert "link busy" not in table


def test_a_mixed_pass_divides_all_of_its_seconds() -> None:
    found = summarize([MIXED], rows=ROWS).measured_times
    assert (found.prefill.compute_seconds, found.decode.compute_seconds) == (1.5 * 0.75, 1.5 * 0.25)
    assert (found.prefill.stall_seconds, found.decode.stall_seconds) == (0.375, 0.125)


def test_a_pass_is_predicted_as_its_phase_is_on_average() -> None:
    phase = PhaseTime(num_passes=4, seconds=8.0, stall_seconds=2.0)
    prediction = Prediction(prefill=phase, decode=PhaseTime(num_passes=2, seconds=1.0))
    assert mean_pass(prediction, 1.0).seconds == 2.0
    assert mean_pass(prediction, 0.5).seconds == 0.5 * 2.0 + 0.5 * 0.5
    assert mean_pass(prediction, 0.5).stall_seconds == 0.25


def test_json_keeps_measured_and_predicted_apart(tmp_path: Path) -> None:
    planned = MemoryUse(host_bytes=6 * GIB, device_bytes=0)
    write_summary(tmp_path / "summary.json", summarize([predicted(PREFILL, 2.5)], rows=ROWS, planned=planned))
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert (stored["measured"]["prefill"], stored["predicted"]["prefill"]) == (500.0, 400.0)
    assert (stored["peak"]["host_bytes"], stored["planned"]["host_bytes"]) == (5 * GIB, 6 * GIB)
    assert stored["measured"]["decode_issued"] is None


def test_table_shows_units_separators_and_predictions_in_their_own_column() -> None:
    planned = MemoryUse(host_bytes=6 * GIB, device_bytes=0)
    table = format_table(summarize([predicted(PREFILL, 0.08), predicted(DECODE, 1.5)], rows=ROWS, planned=planned))
    lines = {line.split("  ")[0].strip(): line for line in table.splitlines()}
    assert lines["prefill"].split() == ["prefill", "500.0", "tok/s", "12,500.0", "tok/s"]
    assert lines["decode, issued"].split()[2:] == ["8.0", "tok/s"]
    assert "decode, issued" not in format_table(summarize([replace(DECODE, useful_tokens=4)], rows=ROWS))
    assert lines["decode, useful"].split()[2:] == ["6.0", "tok/s", "2.0", "tok/s"]
    assert lines["peak host memory"].split()[3:] == ["5", "GiB", "6", "GiB"]
    assert lines["prompt tokens"].endswith("1,000")
    assert lines["prompt tokens, padding included"].split()[-1] == "1,200"


def test_passes_that_were_predicted_in_part_are_a_run_that_was_not() -> None:
    summary = summarize([predicted(PREFILL, 2.5), DECODE], rows=ROWS)
    assert (summary.predicted, summary.predicted_times) == (None, None)


def test_table_of_an_unpredicted_run_has_one_column() -> None:
    table = format_table(summarize([replace(PREFILL, padded_tokens=1000)], rows=ROWS))
    assert "predicted" not in table
    assert "padding" not in table
    assert not any(line != line.rstrip() for line in table.splitlines())


def test_numbers_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_summary(tmp_path / "summary.json", summarize([replace(PREFILL, compute_seconds=math.inf)], rows={}))
    assert list(tmp_path.iterdir()) == []


def test_hit_rate_is_that_of_all_passes_and_missing_where_nothing_streams() -> None:
    passes = [replace(PREFILL, prefetch_hits=1, prefetch_misses=3), replace(DECODE, prefetch_hits=5, prefetch_misses=1)]
    streamed, resident = summarize(passes, rows=ROWS), summarize([PREFILL], rows=ROWS)
    assert streamed.hit_rate == 0.6
    assert ["prefetched", "in", "time", "60.0%"] in [line.split() for line in format_table(streamed).splitlines()]
    assert resident.hit_rate is None
    assert "prefetched" not in format_table(resident)


def test_seconds_and_bytes_of_the_kv_are_shown_where_there_are_any() -> None:
    passes = [replace(DECODE, attention_seconds=0.25, bytes_copied_host=MIB, bytes_written_disk=GIB)] * 2
    lines = [line.split() for line in format_table(summarize(passes, rows=ROWS)).splitlines()]
    assert ["decode:", "attention", "0.5", "s"] in lines
    assert ["copied", "to", "the", "host", "2", "MiB"] in lines
    assert ["written", "to", "disk", "2", "GiB"] in lines
    assert "written" not in format_table(summarize([DECODE], rows=ROWS))


def test_experts_are_shares_of_all_in_decode_passes_and_missing_where_none_is_paged() -> None:
    decode = replace(DECODE, experts_total=160, experts_hit=40, experts_read=56)
    prefill = replace(PREFILL, experts_total=160, experts_hit=160, experts_read=160)
    paged = summarize([prefill, decode, decode], rows=ROWS)
    assert paged.experts == ExpertUse(hit=0.25, read=0.35)
    assert "experts read, decode" in format_table(paged)
    assert "35.0%" in format_table(paged)
    assert "experts" not in format_table(summarize([PREFILL, DECODE], rows=ROWS))


def test_experts_of_a_mixed_pass_count_by_what_it_decoded() -> None:
    mixed = replace(MIXED, experts_total=160, experts_hit=120, experts_read=120)
    decode = replace(DECODE, experts_total=160, experts_hit=40, experts_read=40)
    use = summarize([mixed, decode], rows=ROWS).experts
    assert use is not None
    assert use.read == pytest.approx((120 * 0.25 + 40) / (160 * 1.25))


def told(row: PassRow, *, started_at: float, ended: float, host_bytes: int = GIB) -> PassRow:
    return replace(row, started_at=started_at, since_start_seconds=ended, host_bytes=host_bytes, device_bytes=0)


def test_time_on_the_wall_is_that_of_all_starts_and_the_first_token_that_of_the_first() -> None:
    prompts = replace(PREFILL, issued_tokens=0, useful_tokens=0)
    passes = [
        told(DECODE, started_at=500.0, ended=4.0),
        told(prompts, started_at=100.0, ended=12.0),
        told(PREFILL, started_at=100.0, ended=14.0),
        told(DECODE, started_at=100.0, ended=14.5),
    ]
    found = summarize(passes, rows=ROWS).elapsed
    assert found == Elapsed(num_starts=2, seconds=18.5, first_token_seconds=14.0, before_passes_seconds=10.0)
    table = {line.split("  ")[0]: line for line in format_table(summarize(passes, rows=ROWS)).splitlines()}
    assert table["elapsed, in 2 starts"].split()[-2:] == ["18.5", "s"]
    assert table["until the first token"].split()[-2:] == ["14", "s"]


def test_time_on_the_wall_counts_once_where_workers_ran_at_a_time() -> None:
    spans = [(100.0, 10.0), (104.0, 3.0), (106.0, 9.0), (130.0, 2.0)]
    found = summarize([told(DECODE, started_at=at, ended=ended) for at, ended in spans], rows=ROWS).elapsed
    assert found is not None
    assert (found.num_starts, found.seconds) == (4, 17.0)


def test_mean_memory_counts_a_pass_by_its_time() -> None:
    passes = [told(PREFILL, started_at=0.0, ended=2.0), told(DECODE, started_at=0.0, ended=2.5, host_bytes=6 * GIB)]
    assert summarize(passes, rows=ROWS).mean == MemoryUse(host_bytes=2 * GIB, device_bytes=0)


def test_resources_are_busy_for_a_share_of_each_phase_measured_beside_predicted() -> None:
    used = summarize([predicted(PREFILL, 2.0), predicted(DECODE, 2.0)], rows=ROWS)
    assert used.utilisation is not None
    assert used.predicted_utilisation is not None
    assert used.utilisation.prefill == BusyShares(disk=0.5, link=0.0, compute=0.75, bubble_seconds=0.5)
    assert used.predicted_utilisation.run == BusyShares(
        disk=0.55, link=0.0, compute=0.2, bubble_seconds=pytest.approx(3.2)
    )


def test_a_run_without_accelerator_or_disk_has_no_lines_of_nothing() -> None:
    plain = {"load_seconds": 0.0, "stall_seconds": 0.0, "bytes_read_disk": 0, "bytes_copied_device": 0}
    passes = [replace(row, peak_device_bytes=0, compute_seconds=row.seconds, **plain) for row in (PREFILL, DECODE)]
    for line in format_table(summarize(passes, rows={"ok": 4})).splitlines():
        assert not line.endswith((" 0 s", " 0 B", " 0%", " 0")), line


def test_tokens_that_were_spared_are_added_up_where_passes_say_them():
    passes = [replace(PREFILL, spared_tokens=500), replace(PREFILL, spared_tokens=-20), PREFILL, DECODE]
    summary = summarize(passes, rows=ROWS)
    assert summary.spared_prompt_tokens == 480
    line = next(line for line in format_table(summary).splitlines() if "saved by prefix sharing" in line)
    assert line.split() == ["prompt", "tokens", "saved", "by", "prefix", "sharing", "480"]
    assert "saved by prefix sharing" not in format_table(summarize([PREFILL, DECODE], rows=ROWS))
