"""A run in windows has the rows of one that holds them all, whatever ends it, and says the same of itself."""

import errno
import io
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from jobs.config.settings import GenerateConfig, ScoreConfig, ScoreSettings, Workers
from jobs.datasets import DatasetConfig, DatasetKind, DuplicatePolicy, ShardConfig
from jobs.datasets.fields import BadRowPolicy
from jobs.exporting.config import ExportConfig
from jobs.exporting.export import export
from jobs.record.run_dir import RunDirectory
from jobs.record.run_reader import Condition, find_runs
from jobs.reporting.status import format_text, read_status
from jobs.run import input as run_input
from jobs.run.tasks.generate import generate
from jobs.run.tasks.score import score
from runtime.config.profiles import DEFAULT_BACKENDS, BackendTable, LinearBackend
from runtime.config.settings import Admission, DevicesConfig, Parallelism, PolicyConfig, PolicyKind, SamplingConfig
from runtime.engine.engine import Engine
from runtime.engine.setup import Setup
from runtime.errors import (
    ConfigError,
    DamagedRunError,
    DatasetError,
    Interrupted,
    OutputError,
    RunMismatchError,
)
from runtime.library import api
from runtime.measure.machine_cache import current_host, save_rates
from tests.dealt import with_slow_others
from tests.jobs.windowed_input import BAD_ROW, NUM_ROWS, WindowedInput, records
from tests.runtime.test_machine_cache import RATES
from tests.support import always

WINDOW, NUM_WINDOWS = 7, 4


@pytest.fixture
def case(tmp_path: Path) -> WindowedInput:
    """The input as JSON lines."""
    return WindowedInput(home=tmp_path).write()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a run of that input in one window."""
    case = WindowedInput(home=tmp_path_factory.mktemp("whole")).write()
    case.run("whole", None)
    return case.rows("whole")


def files_of(directory: RunDirectory) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.generations.iterdir())}


def stopped_after(num_calls: int) -> Any:
    calls = iter(range(num_calls))
    return lambda: next(calls, None) is None


@pytest.mark.parametrize("kind", with_slow_others(["jsonl", "parquet"], ["jsonl"]))
def test_rows_in_windows_are_those_of_one_window(tmp_path: Path, kind: str) -> None:
    case = WindowedInput(home=tmp_path, kind=kind).write()
    whole, parted = case.run("whole", None), case.run("parted", WINDOW)
    assert case.rows("parted") == case.rows("whole")
    assert parted.summary.rows == whole.summary.rows == {"ok": NUM_ROWS - 1, "error": 1, "skipped": 0}
    assert parted.summary.useful_tokens == whole.summary.useful_tokens
    directory = case.directory("parted")
    assert len(directory.plans) == NUM_WINDOWS
    assert not directory.plan.exists()
    blocks = [set(pq.read_table(plan, columns=["block"])["block"].to_pylist()) for plan in directory.plans]
    assert sorted(block for each in blocks for block in each) == list(range(len(files_of(directory))))


def test_a_run_in_windows_that_is_stopped_again_and_again_ends_with_the_same_rows(
    case: WindowedInput, whole: list[dict[str, Any]]
) -> None:
    config, num_starts, num_calls = case.config("stopped", WINDOW, checkpoint_seconds=0.0), 0, 12
    while not case.directory("stopped").success.exists():
        num_starts, num_calls = num_starts + 1, num_calls + 7
        try:
            generate(config, stopped_after(num_calls))
        except Interrupted:
            continue
    assert num_starts > NUM_WINDOWS
    assert case.rows("stopped") == whole
    assert generate(config, lambda: False).was_finished


@pytest.mark.parametrize("window", with_slow_others([None, WINDOW], [WINDOW]), ids=["whole", "in windows"])
def test_a_run_that_goes_on_multiplies_as_it_began_whatever_was_measured_meanwhile(
    window: int | None, case: WindowedInput, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("runtime.measure.machine_cache.cache_root", lambda: tmp_path / "cache")
    seen = list[BackendTable]()
    engine_of = api.Engine

    def noted(setup: Setup, *rest: Any) -> Engine:
        seen.append(setup.model.backends or DEFAULT_BACKENDS)
        return engine_of(setup, *rest)

    monkeypatch.setattr(api, "Engine", noted)
    config = case.config("stopped", window, checkpoint_seconds=0.0)
    with pytest.raises(Interrupted):
        generate(config, stopped_after(20))
    save_rates(current_host("cpu", torch.get_num_threads()), RATES, always(LinearBackend.inputs_first))
    generate(config, lambda: False)
    assert len(seen) == (2 if window is None else NUM_WINDOWS + 1)
    if window is not None:
        directory = case.directory("stopped")
        for block in pq.read_table(directory.plans[-1], columns=["block"])["block"].unique().to_pylist():
            directory.generations_part(block).unlink()
        directory.plans[-1].unlink()
        directory.success.unlink()
        generate(config, lambda: False)
        assert len(seen) == NUM_WINDOWS + 2, "the last window was planned anew"
    assert seen == [DEFAULT_BACKENDS] * len(seen)
    case.run("another", window)
    assert seen[-1] == always(LinearBackend.inputs_first), "a new run goes by the measurement"


def test_a_committed_window_is_passed_over_and_none_of_its_rows_is_read(
    case: WindowedInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.run("run", WINDOW)
    monkeypatch.setattr(run_input, "make_survey", lambda *_: pytest.fail("the input was looked through again"))
    directory, read = case.directory("run"), list[int]()
    expected = files_of(directory)
    own = run_input.RowWindows.read
    monkeypatch.setattr(run_input.RowWindows, "read", lambda self, number: read.append(number) or own(self, number))
    directory.success.unlink()
    third = pq.read_table(directory.plans[2], columns=["block"])["block"].to_pylist()
    directory.generations_part(third[0]).unlink()
    case.run("run", WINDOW)
    assert read == [2, NUM_WINDOWS - 1]
    assert files_of(directory) == expected


@pytest.mark.slow("jobs/test_windows.py::test_a_window_of_bad_rows_alone_is_passed_by_workers")
def test_workers_share_windows_out(case: WindowedInput) -> None:
    case.run("alone", WINDOW)
    changes: dict[str, Any] = {"workers": Workers.elastic, "lease_seconds": 3600.0}
    with pytest.raises(Interrupted):
        generate(case.config("shared", WINDOW, **changes), stopped_after(25))
    assert not case.run("shared", WINDOW, **changes).was_finished
    assert case.rows("shared") == case.rows("alone")
    assert files_of(case.directory("shared")).keys() == files_of(case.directory("alone")).keys()


def test_another_machine_goes_on_from_the_copy_of_a_run_in_windows(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    url = f"memory://{tmp_path.name}-windows"
    case, other = WindowedInput(home=tmp_path / "one"), WindowedInput(home=tmp_path / "other")
    for each in (case, other):
        each.home.mkdir()
        each.write()
    with pytest.raises(Interrupted):
        generate(case.config("here", WINDOW, output_url=url), lambda: len(case.directory("here").plans) > 2)
    there = files_of(case.directory("here"))
    other.run("here", None, output_url=url)
    assert other.rows("here") == whole
    assert there.items() <= files_of(other.directory("here")).items()
    assert len(other.directory("here").plans) == NUM_WINDOWS


@pytest.mark.slow("jobs/test_windows.py::test_a_shard_without_a_row_in_the_last_window_ends")
def test_shards_and_samples_in_windows_are_those_of_one(case: WindowedInput) -> None:
    sampling = SamplingConfig(max_new_tokens=2, temperature=0.8, n=2)
    case.run("whole", None, sampling=sampling)
    rows = list[dict[str, Any]]()
    for index in range(2):
        shard = ShardConfig(index=index, count=2)
        case.run("parted", 2 * WINDOW, sampling=sampling, shard=shard)
        assert len(case.directory("parted", shard).plans) == 2
        rows += case.rows("parted", shard)
    assert sorted(rows, key=lambda row: (row["row_index"], row["sample_index"])) == case.rows("whole")


def test_a_shard_without_a_row_in_the_last_window_ends(case: WindowedInput) -> None:
    shard = ShardConfig(index=2, count=3)
    outcome = case.run("parted", (NUM_ROWS - 1) // 3, shard=shard)
    assert [row["row_index"] for row in case.rows("parted", shard)] == list(range(2, NUM_ROWS, 3))
    assert len(RunDirectory(path=outcome.directory).plans) == 2
    assert case.run("parted", (NUM_ROWS - 1) // 3, shard=shard).was_finished


def test_a_window_of_bad_rows_alone_is_passed_by_workers(case: WindowedInput) -> None:
    rows = records()
    for row in rows[WINDOW : 2 * WINDOW]:
        row["prompt"] = ""
    case.write(rows)
    outcome = case.run("run", WINDOW, workers=Workers.elastic)
    assert (outcome.summary.rows["error"], outcome.summary.rows["ok"]) == (WINDOW + 1, NUM_ROWS - WINDOW - 1)


@pytest.mark.slow("jobs/test_windows.py::test_a_run_in_windows_that_is_stopped_again_and_again_ends_with_the_same_rows")
def test_continuous_admission_goes_through_windows(case: WindowedInput, whole: list[dict[str, Any]]) -> None:
    policy = PolicyConfig(
        kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=1, admission=Admission.continuous
    )
    with pytest.raises(Interrupted):
        generate(case.config("parted", WINDOW, policy=policy), stopped_after(20))
    case.run("parted", WINDOW, policy=policy)
    assert case.rows("parted") == whole


@pytest.mark.slow("jobs/test_windows.py::test_rows_in_windows_are_those_of_one_window")
def test_scores_in_windows_have_the_totals_of_one(tmp_path: Path) -> None:
    rows = [row | {"target": f" {i}"} for i, row in enumerate(records())]
    case = WindowedInput(home=tmp_path).write(rows)
    totals = []
    for run, window_rows in (("whole", None), ("parted", WINDOW)):
        values = vars(case.config(run, window_rows, sampling=SamplingConfig()))
        totals.append(score(ScoreConfig(**values, score=ScoreSettings()), lambda: False).summary.totals)
    whole, parted = (total or {} for total in totals)
    assert parted == pytest.approx(whole)
    assert parted["num_rows"] == NUM_ROWS - 1
    with pytest.raises(ConfigError, match="rolling"):
        ScoreConfig(**vars(case.config("rolling", WINDOW)), score=ScoreSettings(rolling=True))


def test_ids_that_repeat_in_another_window_are_refused_by_name_or_dropped(case: WindowedInput) -> None:
    rows = records()
    rows[16]["key"] = rows[23]["key"] = "row 1"
    case.write(rows)
    with pytest.raises(DatasetError, match=r"1 id is used by more than one row \(2 rows too many\): 'row 1' x3"):
        case.run("refused", WINDOW)
    assert not case.directory("refused").path.exists()
    first = {"dedupe": DuplicatePolicy.first}
    case.run("whole", None, dataset=first)
    case.run("parted", WINDOW, dataset=first)
    assert case.rows("parted") == case.rows("whole")
    assert [row["row_index"] for row in case.rows("parted")] == list(range(NUM_ROWS - 2))


class FullDisk(io.FileIO):
    """A file on a disk that takes nothing."""

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_where_ids_find_no_room_the_run_can_go_on_and_where_they_may_not_lie_it_is_refused(
    case: WindowedInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(dir: Path) -> BinaryIO:
        raise PermissionError(errno.EACCES, "Permission denied")

    def full(dir: Path) -> BinaryIO:
        return io.BufferedRandom(FullDisk(os.memfd_create("ids"), "r+b"))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(OutputError, match=r"ENOSPC.*output_root="):
        case.run("run", WINDOW)
    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    with pytest.raises(ConfigError, match=r"Permission denied.*output_root="):
        case.run("run", WINDOW)
    monkeypatch.undo()
    case.run("run", WINDOW)
    assert len(case.rows("run")) == NUM_ROWS


def test_a_bad_row_is_refused_before_the_run_where_it_is_asked_for(case: WindowedInput) -> None:
    with pytest.raises(DatasetError, match=f"1 of {NUM_ROWS} rows cannot be used; the first: b.jsonl, line"):
        case.run("run", WINDOW, dataset={"on_bad_row": BadRowPolicy.fail})
    with pytest.raises(DatasetError, match="no row has the field 'text'"):
        case.run("run", WINDOW, dataset={"prompt_field": "text"})
    assert not case.directory("run").path.exists()


def test_an_input_in_windows_none_of_whose_rows_can_be_used_is_refused_and_one_good_row_is_enough(
    case: WindowedInput,
) -> None:
    rows = [row | {"prompt": 5} for row in records()]
    case.write(rows)
    with pytest.raises(DatasetError, match=rf"none of {NUM_ROWS} rows of .*; the first: a\.jsonl, line 1, .* a number"):
        case.run("run", WINDOW)
    with pytest.raises(DatasetError, match=r"no row has the field 'heat' .*\(dataset\.temperature_field\)"):
        case.run("run", WINDOW, dataset={"temperature_field": "heat"})
    assert not case.directory("run").path.exists()
    case.write([*rows[:-1], rows[-1] | {"prompt": "one"}])
    assert case.run("run", WINDOW).summary.rows["ok"] == 1


@pytest.mark.parametrize("form", with_slow_others(["zstd", "utf-16", "objects", "list"], ["zstd"]))
def test_rows_of_any_form_in_windows_are_those_of_one_window(form: str, tmp_path: Path) -> None:
    rows = [row | {"prompt": f"{row['prompt']} é \n}}"} for row in records()]
    text = "".join(json.dumps(row, indent=2 if form == "objects" else None) + "\n\n" for row in rows)
    path = tmp_path / "in.jsonl"
    if form == "zstd":
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(text.encode())
    else:
        path.write_text(json.dumps(rows) if form == "list" else text, "utf-16" if form == "utf-16" else "utf-8")
    case = WindowedInput(home=tmp_path)
    own = {"path": str(path)}
    case.run("whole", None, dataset=own)
    with pytest.raises(Interrupted):
        generate(case.config("parted", WINDOW, dataset=own), stopped_after(25))
    case.run("parted", WINDOW, dataset=own)
    assert case.rows("parted") == case.rows("whole")
    assert [row["prompt"] for row in case.rows("parted")] == [row["prompt"] for row in rows]


def test_a_changed_file_is_refused_by_name(case: WindowedInput) -> None:
    with pytest.raises(Interrupted):
        generate(case.config("run", WINDOW), stopped_after(20))
    path = case.home / "input" / "b.jsonl"
    path.write_text(path.read_text().replace("Q: 20", "Q: 21"))
    with pytest.raises(RunMismatchError, match=r"input file b\.jsonl"):
        case.run("run", WINDOW)


def test_a_file_that_changes_while_the_run_goes_on_ends_it(case: WindowedInput) -> None:
    path = case.home / "input" / "a.jsonl"

    def change() -> bool:
        if case.directory("run").plans and not path.read_text().endswith("\n\n"):
            path.write_text(path.read_text() + "\n")
        return False

    with pytest.raises(DatasetError, match=r"a\.jsonl was changed during the run"):
        generate(case.config("run", WINDOW), change)


@pytest.mark.slow("jobs/test_windows.py::test_a_run_in_windows_that_is_stopped_again_and_again_ends_with_the_same_rows")
def test_a_run_keeps_the_windows_that_it_was_begun_with(case: WindowedInput, monkeypatch: pytest.MonkeyPatch) -> None:
    for run, window_rows in (("parted", WINDOW), ("whole", None)):
        with pytest.raises(Interrupted):
            generate(case.config(run, window_rows), stopped_after(20))
    monkeypatch.setattr(run_input, "WINDOW_ROWS", 5)
    for run, num_plans in (("parted", NUM_WINDOWS), ("whole", 1)):
        case.run(run, None)
        assert len(case.directory(run).plans) == num_plans
    with pytest.raises(RunMismatchError, match=r"dataset.window_rows: 7 -> 5"):
        case.run("parted", 5)


def test_more_rows_than_a_window_are_read_in_windows_by_themselves(
    case: WindowedInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_input, "WINDOW_ROWS", NUM_ROWS - 1)
    case.run("parted", None)
    assert len(case.directory("parted").plans) == 2
    monkeypatch.setattr(run_input, "WINDOW_ROWS", NUM_ROWS)
    case.run("whole", None)
    assert case.directory("whole").plan.exists()


def test_status_and_export_know_windows(case: WindowedInput, tmp_path: Path) -> None:
    case.run("whole", None)
    with pytest.raises(Interrupted):
        generate(case.config("run", WINDOW), stopped_after(30))
    found = read_status(find_runs([str(case.directory("run").path)], "run")[0])
    assert (found.state, found.num_windows) == ("interrupted", NUM_WINDOWS)
    assert 1 <= found.num_windows_planned < NUM_WINDOWS
    assert f"windows {found.num_windows_planned} of {NUM_WINDOWS} planned" in format_text([found])
    case.run("run", WINDOW)
    run = find_runs([str(case.directory("run").path)], "run")[0]
    assert (read_status(run).state, run.condition, run.num_rows) == ("done", Condition.done, NUM_ROWS)
    texts = []
    for name in ("run", "whole"):
        out = tmp_path / f"{name}.jsonl"
        export(ExportConfig(run=str(case.directory(name).path), out=str(out)))
        texts.append(out.read_text())
    assert texts[0] == texts[1]
    assert json.loads(texts[0].splitlines()[BAD_ROW])["status"] == "error"


def test_a_plan_that_is_not_the_next_ones_neighbour_is_refused(case: WindowedInput) -> None:
    with pytest.raises(Interrupted):
        generate(case.config("run", WINDOW), stopped_after(45))
    directory = case.directory("run")
    assert len(directory.plans) > 1
    directory.window_plan(1).write_bytes(directory.window_plan(0).read_bytes())
    with pytest.raises(DamagedRunError, match="begins with block 0, but the plans before it end with"):
        case.run("run", WINDOW)


def test_what_holds_its_rows_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"dataset.window_rows is not supported by dataset.kind=csv"):
        DatasetConfig(kind=DatasetKind["csv"], path="rows.csv", window_rows=7)
    jsonl = DatasetConfig(kind=DatasetKind["jsonl"], path="rows.jsonl", window_rows=7)
    with pytest.raises(ConfigError, match=r"dataset.window_rows does not support dataset.repeat=2"):
        replace(jsonl, repeat=2)
    with pytest.raises(ConfigError, match="multi-turn chats"):
        GenerateConfig(dataset=replace(jsonl, turns_field="turns", chat_template=True))


def test_ranks_hold_all_rows_and_refuse_windows_by_name(case: WindowedInput) -> None:
    ranks = DevicesConfig(way=Parallelism.sharded)
    with pytest.raises(ConfigError, match=r"devices=sharded does not support dataset\.window_rows: set it to null"):
        case.config("run", WINDOW, devices=ranks)
    begun = {"semantic": {run_input.WINDOW_KEY: WINDOW}}
    with pytest.raises(ConfigError, match=r"devices=sharded .* started with dataset\.window_rows=7"):
        run_input.open_windowed_rows(case.config("run", None, devices=ranks), case.home / "run", lambda: False, begun)
