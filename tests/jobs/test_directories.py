"""An evaluation shows its runs, its state and its metrics; a server its batches; a folder of runs its runs."""

import json
import os
from pathlib import Path

import pytest

from jobs.files.locks import RunLock
from jobs.record.run_dir import EVALUATION_NAME, RunDirectory
from jobs.reporting.directories import Found, find_directories
from jobs.reporting.figures import RunFigures
from jobs.reporting.overview import make_overview
from jobs.reporting.status import format_json, format_text, read_statuses
from jobs.reporting.text_tables import format_evaluations
from runtime.errors import ConfigError
from tests.jobs.sharded_run import ShardedRun

RESULTS = {
    "results": {
        "addition": {"alias": "addition", "acc,none": 0.75, "acc_stderr,none": 0.25, "sample_len": 4},
        "words": {"alias": "words", "exact_match,strict": 1.0, "exact_match_stderr,strict": "N/A"},
    },
    "groups": {},
}
IDS = [f"batch_{digit * 24}" for digit in "abc"]


def finished_run(path: Path) -> RunDirectory:
    case = ShardedRun(folder=path.parent / f".{path.name}").finish(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    case.directory(0).path.rename(path)
    return RunDirectory(path=path)


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    path = tmp_path / "evaluate" / "ev"
    finished_run(path / "loglikelihood")
    (path / EVALUATION_NAME).write_text(json.dumps({"model": "models/mine", "tasks": ["addition", "words"]}))
    return path


def find(*names: object) -> Found:
    return find_directories([str(name) for name in names], "run")


def status(*names: object) -> str:
    return format_text(read_statuses(find(*names)))


def test_an_evaluation_before_its_end_shows_its_tasks_and_the_progress_of_its_runs(evaluation: Path) -> None:
    text = status(evaluation)
    assert text.startswith(f"{evaluation}: interrupted\nmodel   models/mine\ntasks   addition, words\n")
    assert f"{evaluation}/loglikelihood: done\nrows    16 of 16" in text
    assert "metric" not in text


def test_an_evaluation_is_running_also_between_its_runs(evaluation: Path) -> None:
    lock = RunLock(evaluation / ".lock")
    assert status(evaluation).startswith(f"{evaluation}: running")
    lock.release()
    assert status(evaluation).startswith(f"{evaluation}: interrupted")


def test_a_finished_evaluation_shows_its_metrics(evaluation: Path) -> None:
    (evaluation / "results.json").write_text(json.dumps(RESULTS))
    lines = [line.split() for line in status(evaluation).splitlines()]
    assert lines[0][-1] == "done"
    assert ["addition", "acc", "0.7500", "0.2500"] in lines
    assert ["words", "exact_match", "(strict)", "1.0000", "-"] in lines
    [found] = json.loads(format_json(read_statuses(find(evaluation))))
    assert found["tasks"] == ["addition", "words"]
    assert found["metrics"][0] == {"task": "addition", "name": "acc", "value": 0.75, "error": 0.25}
    assert [run["state"] for run in found["runs"]] == ["done"]


def test_results_of_earlier_tasks_are_not_those_of_this_evaluation(evaluation: Path) -> None:
    (evaluation / "results.json").write_text(json.dumps(RESULTS))
    os.utime(evaluation / "results.json", (1, 1))
    assert status(evaluation).startswith(f"{evaluation}: interrupted")


def test_a_report_compares_evaluations_and_their_runs(evaluation: Path) -> None:
    (evaluation / "results.json").write_text(json.dumps(RESULTS))
    other = evaluation.with_name("other")
    finished_run(other / "loglikelihood")
    (other / EVALUATION_NAME).write_text(json.dumps({"model": "tiny", "tasks": ["addition"]}))
    found = find(evaluation.parent / "*")
    lines = [line.split() for line in format_evaluations(found.evaluations)]
    assert ["ev", "models/mine", "done", "addition", "acc", "0.7500", "0.2500"] in lines
    assert ["other", "tiny", "interrupted", "addition", "-", "-", "-"] in lines
    text = make_overview([RunFigures(run=run) for run in found.all_runs]).text()
    assert {"ev/loglikelihood", "other/loglikelihood"} <= {line.split()[0] for line in text.splitlines() if line}


@pytest.mark.parametrize("name", ["serve", "serve/batches"])
def test_a_server_shows_its_batches(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "serve" / "batches"
    folder.mkdir(parents=True)
    records = {
        IDS[0]: {"status": "completed", "created_at": 1},
        IDS[1]: {"status": "in_progress", "created_at": 2},
        IDS[2]: {"status": "failed", "created_at": 3, "errors": {"data": [{"message": "line 3 is bad"}]}},
    }
    for id, record in records.items():
        (folder / f"{id}.json").write_text(json.dumps({**record, "id": id, "request_counts": {"total": 16}}))
    (folder / f"batch_{'d' * 24}.json").write_text("not JSON")
    finished_run(tmp_path / "generate" / IDS[0])
    run = finished_run(tmp_path / "encode" / IDS[1])
    run.success.unlink()
    run.generations_part(3).unlink()
    text = status(tmp_path / name)
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith(f"{tmp_path / 'serve'}: 3 batches: 1 completed, 1 in_progress, 1 failed")
    assert [IDS[0], "completed", "16", "of", "16", str(tmp_path / "generate" / IDS[0])] in lines
    assert [IDS[1], "in_progress", "12", "of", "16", str(tmp_path / "encode" / IDS[1])] in lines
    assert [IDS[2], "failed", "0", "of", "16", "-"] in lines
    assert f"{IDS[2]} failed: line 3 is bad" in text
    assert "blocks  3 of 4 done" in text, "of the unfinished one"
    assert [run.path.name for run in find(tmp_path / name).all_runs] == IDS[:2]
    [found] = json.loads(format_json(read_statuses(find(tmp_path / name))))
    assert [each["run"] and each["run"]["num_rows_done"] for each in found["batches"]] == [16, 12, None]


def test_a_folder_of_runs_is_its_runs_and_a_run_is_itself(tmp_path: Path) -> None:
    for name in ("a", "b"):
        finished_run(tmp_path / "generate" / name)
    assert [run.path.name for run in find(tmp_path / "generate").runs] == ["a", "b"]
    assert [run.path.name for run in find(tmp_path / "generate" / "a").runs] == ["a"]
    with pytest.raises(ConfigError, match="is not a run"):
        find(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        find(tmp_path / "nowhere")
