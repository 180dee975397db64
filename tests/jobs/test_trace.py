"""From a run with `trace=true` to a picture: every action of the run is in its trace, the numbers are those of the
throughput part."""

import math
import os
import socket
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs import trace
from jobs.config.cli import run_job
from jobs.config.settings import GenerateConfig, TraceConfig, Workers
from jobs.datasets import DatasetConfig
from jobs.pictures.trace_file import PREDICTED, RUN, read_processes, read_trace
from jobs.pictures.trace_picture import TimeWindow, lay_out
from jobs.record.run_dir import RunDirectory
from jobs.record.run_reader import find_runs
from jobs.record.summary import summarize
from jobs.reporting.figures import RunFigures
from jobs.run.tasks.generate import generate
from runtime.config.settings import (
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    Prefetch,
    PrefetchConfig,
    SamplingConfig,
    Tier,
)
from runtime.resources import Resource
from runtime.trace import Span

BY_STAGE = {"read": "load", "copy": "copy", "compute": "compute", "attention": "attention", "stall": "stall"}
FIXED = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=1, num_micro_batches=2, draft_tokens=0)


def run(
    output_root: Path,
    name: str,
    *,
    prefetch: Prefetch = Prefetch.lookahead,
    is_traced: bool = True,
    workers: Workers = Workers.one,
    policy: PolicyConfig = FIXED,
) -> RunDirectory:
    config = GenerateConfig(
        run=name,
        output_root=str(output_root),
        trace=is_traced,
        workers=workers,
        dataset=DatasetConfig(limit=4),
        offload=OffloadConfig(tier=Tier.nvme, resident_layers=0),
        prefetch=PrefetchConfig(kind=prefetch),
        policy=policy,
        sampling=SamplingConfig(max_new_tokens=4, ignore_eos=True),
    )
    return RunDirectory(path=generate(config, lambda: False).directory)


def passes(directory: RunDirectory) -> list[dict[str, Any]]:
    return pq.read_table(directory.throughput).to_pylist()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return run(tmp_path_factory.mktemp("outputs"), "traced")


@pytest.fixture(scope="module")
def spans(traced: RunDirectory) -> list[Span]:
    return [*read_trace(traced.trace / "start-00000.json").spans]


def seconds(spans: Sequence[Span], row: Resource) -> float:
    return math.fsum(span.end - span.begin for span in spans if span.resource is row)


def test_every_action_of_a_lane_and_every_read_is_a_span(traced: RunDirectory, spans: list[Span]) -> None:
    """Embeddings, four layers and head, of which the layers are streamed; each sequence is a lane."""
    rows = passes(traced)
    computed = [span.name for span in spans if span.resource is Resource.compute]
    assert {len(row["stage_compute_seconds"]) for row in rows} == {6}
    assert set(computed) == {f"run {stage}.{lane}" for stage in range(6) for lane in range(2)}
    assert len(computed) == 6 * sum(row["num_sequences"] for row in rows)
    assert {span.name for span in spans if span.resource is Resource.disk} == {f"read {stage}" for stage in range(1, 5)}


def test_passes_are_those_of_the_throughput_and_busy_shares_those_of_the_summary(traced: RunDirectory) -> None:
    measured, rows = read_trace(traced.trace / "start-00000.json"), passes(traced)
    assert [each.name.split()[0] for each in measured.passes] == [row["phase"] for row in rows]
    assert [each.seconds for each in measured.passes] == pytest.approx([row["seconds"] for row in rows], abs=1e-6)
    used = summarize(RunFigures(run=find_runs([str(traced.path)], "run")[0]).passes, rows={}).utilisation
    assert used is not None
    assert used.run is not None
    busy = {row.resource: row.busy for row in lay_out(measured, TimeWindow(begin=0.0, end=measured.end))}
    assert busy[Resource.compute] == pytest.approx(used.run.compute, rel=1e-3)
    assert busy[Resource.disk] == pytest.approx(used.run.disk, rel=1e-3)


def test_a_trace_begins_with_the_first_pass_and_not_with_a_trial(tmp_path: Path) -> None:
    """A searched policy runs a pass as a trial, which is in no throughput."""
    directory = run(tmp_path, "searched", policy=PolicyConfig())
    traced = read_trace(directory.trace / "start-00000.json")
    assert min(span.begin for span in traced.spans) == 0.0
    computed = [span for span in traced.spans if span.name.startswith("run 0.")]
    assert len(traced.passes) == len(passes(directory))
    assert min(span.begin for span in computed) >= traced.passes[0].begin


def test_spans_lie_within_the_run_and_lanes_compute_in_turn(spans: list[Span]) -> None:
    computing = sorted((span.begin, span.end) for span in spans if span.resource is Resource.compute)
    assert all(0 <= span.begin <= span.end for span in spans)
    assert all(end <= begin + 1e-6 for (_, end), (begin, _) in pairwise(computing))


def test_columns_by_stage_add_up_to_those_of_the_pass_and_to_the_trace(traced: RunDirectory, spans: list[Span]) -> None:
    rows = passes(traced)
    for row in rows:
        for name, total in BY_STAGE.items():
            assert sum(row[f"stage_{name}_seconds"]) == pytest.approx(row[f"{total}_seconds"])
    compute = sum(sum(row["stage_compute_seconds"]) for row in rows)
    assert compute == pytest.approx(seconds(spans, Resource.compute), rel=1e-3)
    assert 0 < sum(sum(row["stage_attention_seconds"]) for row in rows) < compute


def test_each_streamed_stage_is_a_hit_or_a_miss_in_each_pass(traced: RunDirectory, tmp_path: Path) -> None:
    """Without prefetch a lane asks just after the read was begun: few come in time."""
    assert {row["prefetch_hits"] + row["prefetch_misses"] for row in passes(traced)} == {4}
    plain = passes(run(tmp_path, "plain", prefetch=Prefetch.off))
    assert {row["prefetch_hits"] + row["prefetch_misses"] for row in plain} == {4}
    assert sum(row["prefetch_misses"] for row in plain) > sum(row["prefetch_hits"] for row in plain)


def test_without_trace_there_is_no_trace_and_the_same_columns(traced: RunDirectory, tmp_path: Path) -> None:
    plain = run(tmp_path, "plain", is_traced=False)
    assert not plain.trace.exists()
    assert passes(plain)[0].keys() == passes(traced)[0].keys()


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["trace", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_job(trace.main, TraceConfig)
    return ended.value.code


def test_a_picture_lies_beside_the_trace(
    traced: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = traced.trace / "start-00000.json"
    assert command(monkeypatch, f"run={path}") == 0
    assert path.with_suffix(".svg").read_text().startswith("<?xml")
    assert capsys.readouterr().out.startswith(f"{path.with_suffix('.svg')}: 0 s to ")


@pytest.mark.slow("jobs/test_trace.py::test_every_action_of_a_lane_and_every_read_is_a_span")
def test_each_worker_writes_a_trace_and_a_run_shows_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run(tmp_path, "shared", workers=Workers.elastic)
    (mine,) = directory.trace.iterdir()
    assert mine.name == f"worker-{socket.gethostname()}-{os.getpid()}-00000.json"
    assert {span.name.split()[0] for span in read_trace(mine).spans} >= {"read", "run"}
    other, cut = (mine.with_name(f"worker-elsewhere-{pid}-00000.json") for pid in (7, 8))
    other.write_bytes(mine.read_bytes())
    cut.write_bytes(mine.read_bytes()[:-20])
    assert command(monkeypatch, f"run={directory.path}") == 0
    picture = directory.trace / "all.svg"
    assert capsys.readouterr().out.startswith(f"{picture}: 0 s to ")
    assert [path.name in picture.read_text() for path in (mine, other, cut)] == [True, True, False]
    assert command(monkeypatch, f"run={other}") == 0
    assert mine.name not in other.with_suffix(".svg").read_text()
    assert command(monkeypatch, f"run={cut}") == 2
    assert command(monkeypatch, f"run={directory.generations}") == 2
    assert "has no trace: start the run with trace=true" in capsys.readouterr().err


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run is not set"),
        (["run=nowhere.json"], "cannot read run=nowhere.json: No such file"),
        (["run=x", "begin=2", "end=1"], "end must be after begin=2.0 s, got 1.0"),
        (["run=x", "out=picture.pdf"], "out must end in .svg or .png, got picture.pdf"),
        (["run={trace}", "begin=1e6"], "begin=1e+06 s must be before the end of the window; the trace ends at "),
    ],
)
def test_a_wrong_window_or_path_is_refused_in_one_line(
    traced: RunDirectory,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = traced.trace / "start-00000.json"
    assert command(monkeypatch, *(argument.format(trace=path) for argument in arguments)) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_what_was_predicted_of_each_pass_stands_beside_what_ran(traced: RunDirectory, spans: list[Span]) -> None:
    processes = read_processes(traced.trace / "start-00000.json")
    assert list(processes) == [RUN, PREDICTED]
    assert processes[RUN].spans == spans
    rows, predicted = passes(traced), processes[PREDICTED].spans
    assert [each.name for each in processes[PREDICTED].passes] == [each.name for each in processes[RUN].passes]
    computed = [span.name for span in predicted if span.resource is Resource.compute]
    assert len(computed) == 6 * sum(row["num_sequences"] for row in rows)
    assert {span.resource for span in predicted} >= {Resource.disk, Resource.compute}
