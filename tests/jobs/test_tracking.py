"""What trackers and Prometheus get of a run: by the real packages where installed, and never in a run's way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from jobs.config.settings import GenerateConfig, Tracker, operational
from jobs.record.exposition import MetricFamily, format_metrics
from jobs.record.passes import PassRow
from jobs.record.run_reader import find_runs
from jobs.tracking import curves, feed, reporter, sending
from jobs.tracking.curves import Curves
from jobs.tracking.feed import RunFeed
from jobs.tracking.follower import RunFollower
from jobs.tracking.sending import send_run
from jobs.tracking.trackers import TrackedRun
from runtime.errors import ConfigError, Interrupted, OutputError
from tests.jobs.part_support import PASSES
from tests.jobs.sharded_run import NUM_SHARDS, ShardedRun

POINT = {"throughput/decode_tokens_per_second": 12.5, "progress/rows_done": 3.0}
SUMMARY = {
    "rows": {"ok": 3, "error": 1},
    "measured": {"prefill": 100.0, "decode_useful": 10.5},
    "predicted": None,
    "measured_times": {"prefill": {"seconds": 2.0}, "decode": {"seconds": 4.0}},
    "utilisation": {"prefill": {"disk": 0.5, "link": 0.0, "compute": 0.9}, "decode": None},
}
MANIFEST = {
    "semantic": {"model.name": "tiny", "dataset.limit": 4, "sampling.stop": ["a|b"]},
    "operational": {"output_root": "outputs"},
    "versions": {"torch": "2.13.0"},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run, as far as trackers read it."""
    folder = tmp_path / "generate" / "mine"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(MANIFEST))
    return folder


def report(
    run: Path,
    messages: Sequence[Mapping[str, object]],
    *,
    track: Sequence[str] = (),
    metrics_file: Path | None = None,
    worker: str | None = None,
    **environment: str,
) -> list[dict[str, str]]:
    """What the reporting process says after these messages."""
    settings = {
        "directory": str(run),
        "track": list(track),
        "metrics_file": None if metrics_file is None else str(metrics_file),
        "worker": worker,
        "started_at": time.time() - 5,
    }
    ended = subprocess.run(
        [sys.executable, "-P", "-m", feed.MODULE, json.dumps(settings)],
        input="".join(json.dumps(message) + "\n" for message in messages),
        env=os.environ | {"PYTHONPATH": str(feed.ROOT)} | environment,
        cwd=run.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def needs(tracker: Tracker) -> None:
    if find_spec(tracker.value) is None:
        pytest.skip(f"{tracker.value} is not installed: make trackers")


def messages(run: Path, status: str = "finished", exit_code: int = 0) -> list[dict[str, object]]:
    """A point and the end of a run that has written its summary."""
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    return [{"at": time.time(), "values": POINT}, {"status": status, "exit_code": exit_code}]


def test_text_of_metrics_is_that_of_prometheus() -> None:
    families = [
        MetricFamily(name="a_total", help="Line one\nand \\two.", samples=[({}, 3), ({"run": 'b"\\\n'}, 0.25)]),
        MetricFamily(name="none", help="Not there.", samples=[]),
        MetricFamily(name="b", help="A gauge.", samples=[({"x": "1", "y": "2"}, float("nan"))]),
    ]
    assert format_metrics(families) == (
        "# HELP a_total Line one\\nand \\\\two.\n# TYPE a_total counter\n"
        'a_total 3\na_total{run="b\\"\\\\\\n"} 0.25\n'
        '# HELP b A gauge.\n# TYPE b gauge\nb{x="1",y="2"} nan\n'
    )
    assert format_metrics([]) == ""


def test_a_point_has_the_rates_of_its_interval_and_the_sums_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "SECONDS_PER_POINT", 10.0)
    found = Curves()
    found.num_rows, found.num_done, found.num_errors = 8, 2, 1
    assert not found.is_due(100.0)
    for row in PASSES:
        found.add(row)
    assert [found.is_due(at) for at in (101.0, 109.9, 110.0)] == [False, False, True]
    first = found.take_point(110.0)
    assert (first["progress/rows_done"], first["progress/rows_planned"], first["progress/rows_error"]) == (2, 8, 1)
    prefill = [row for row in PASSES if row.phase == "prefill"]
    rate = sum(row.prompt_tokens for row in prefill) / sum(row.seconds for row in prefill)
    assert first["throughput/prefill_tokens_per_second"] == pytest.approx(rate)
    assert not found.is_due(125.0), "no pass since"
    decode = PassRow(
        pass_index=9, phase="decode", num_sequences=2, real_tokens=2, padded_tokens=2, prompt_tokens=0, issued_tokens=2,
        useful_tokens=2, seconds=4.0, load_seconds=1.0, copy_seconds=2.0, compute_seconds=3.0, host_bytes=7,
    )  # fmt: skip
    found.add(decode)
    second = found.take_point(125.0)
    assert second["throughput/decode_tokens_per_second"] == 0.5
    assert "throughput/prefill_tokens_per_second" not in second
    assert [second[f"busy/{name}"] for name in ("disk", "link", "compute")] == [0.25, 0.5, 0.75]
    assert second["progress/passes"] == len(PASSES) + 1
    assert second["memory/host_bytes"] == 7
    assert len(json.dumps({"at": 1.0, "values": second})) < 4096, "a message is written whole or not at all"


def test_a_tracked_run_keeps_its_id_and_reads_what_the_run_has_written(run: Path) -> None:
    first = TrackedRun.open(run, worker=None, started_at=100.0)
    again = TrackedRun.open(run, worker="host-7", started_at=200.0)
    assert again.id == f"{first.id}-host-7"
    assert (first.name, again.name, first.job, first.started_at, again.started_at) == (
        "mine", "mine/host-7", "generate", 100.0, 100.0,
    )  # fmt: skip
    assert (first.step(103.9), first.step(50.0)) == (3, 0)
    assert first.settings()["model.name"] == "tiny"
    assert first.settings()["versions.torch"] == "2.13.0"
    assert (first.results(), first.phases()) == ({}, [])
    messages(run)
    assert first.results()["summary/measured.decode_useful"] == 10.5
    assert first.phases() == [
        ["mine", "prefill", 100.0, None, 2.0, None, 0.5, 0.0, 0.9],
        ["mine", "decode", 10.5, None, 4.0, None, None, None, None],
    ]


def test_an_evaluation_has_the_settings_and_sums_of_its_runs_and_the_metrics_of_its_tasks(tmp_path: Path) -> None:
    folder = tmp_path / "evaluate" / "tasks"
    (folder / "loglikelihood").mkdir(parents=True)
    (folder / "loglikelihood" / "run.json").write_text(json.dumps(MANIFEST))
    messages(folder / "loglikelihood")
    scores = {"results": {"gsm8k": {"exact_match,strict-match": 0.5, "alias": "gsm8k"}}}
    (folder / "results.json").write_text(json.dumps(scores))
    tracked = TrackedRun.open(folder, worker=None, started_at=0.0)
    assert tracked.settings()["dataset.limit"] == 4
    assert tracked.results()["results/gsm8k.exact_match_strict-match"] == 0.5
    assert tracked.results()["summary/loglikelihood/rows.ok"] == 3
    assert {row[0] for row in tracked.phases()} == {"loglikelihood"}


def test_a_metrics_file_is_replaced_while_a_run_goes_and_says_how_it_ended(run: Path) -> None:
    path = run.parent / "ws.prom"
    assert report(run, messages(run, "errors", 3), metrics_file=path) == []
    lines = path.read_text().splitlines()
    labels = 'run="mine",job="generate"'
    assert f"weightstream_run_running{{{labels}}} 0" in lines
    assert f"weightstream_run_exit_code{{{labels}}} 3" in lines
    assert f"weightstream_run_rows_done{{{labels}}} 3" in lines
    assert f'weightstream_run_tokens_per_second{{{labels},phase="decode"}} 12.5' in lines
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in run.parent.iterdir() if entry.is_file()] == ["ws.prom"]


def test_a_run_that_was_killed_is_no_longer_running(run: Path) -> None:
    path = run.parent / "ws.prom"
    assert report(run, messages(run)[:1], metrics_file=path) == []
    text = path.read_text()
    assert 'weightstream_run_running{run="mine",job="generate"} 0' in text
    assert "weightstream_run_exit_code" not in text


@pytest.mark.slow("jobs/test_tracking.py::test_a_tracked_run_keeps_its_id_and_reads_what_the_run_has_written")
def test_tensorboard_shows_the_curves_the_settings_and_the_sums(run: Path) -> None:
    needs(Tracker.tensorboard)
    for worker in (None, "host-7"):
        events = report(run, messages(run), track=["tensorboard"], worker=worker)
        folder = run / "tensorboard" if worker is None else run / "tensorboard" / worker
        assert events == [{"target": "track=tensorboard", "location": str(folder)}]
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(run / "tensorboard"))
    shown.Reload()
    [point] = shown.Scalars("throughput/decode_tokens_per_second")
    assert point.value == 12.5
    assert 4 <= point.step < 60, "seconds since the start of the run"
    assert shown.Scalars("summary/measured.prefill")[0].value == 100.0
    [settings] = shown.Tensors("settings")
    assert r"""| sampling.stop | ['a\|b'] |""" in settings.tensor_proto.string_val[0].decode()
    assert "| mine | decode | 10.5 |" in shown.Tensors("phases")[0].tensor_proto.string_val[0].decode()


@pytest.mark.slow("jobs/test_tracking.py::test_a_tracked_run_keeps_its_id_and_reads_what_the_run_has_written")
def test_mlflow_has_one_run_over_two_starts(run: Path, tmp_path: Path) -> None:
    needs(Tracker.mlflow)
    uri = (tmp_path / "mlruns").as_uri()
    for status, code in (("interrupted", 75), ("finished", 0)):
        [event] = report(run, messages(run, status, code), track=["mlflow"], MLFLOW_TRACKING_URI=uri)
        assert event.get("location", "").endswith(f"of experiment weightstream in {uri}"), event
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
    [stored] = client.search_runs([client.get_experiment_by_name("weightstream").experiment_id])
    assert (stored.info.status, stored.info.run_name) == ("FINISHED", "mine")
    assert stored.data.params["model.name"] == "tiny"
    assert stored.data.metrics["throughput/decode_tokens_per_second"] == 12.5
    assert stored.data.metrics["summary/measured.decode_useful"] == 10.5
    assert len(client.get_metric_history(stored.info.run_id, "progress/rows_done")) == 2
    assert "phases.md" in [file.path for file in client.list_artifacts(stored.info.run_id)]


@pytest.mark.slow("jobs/test_tracking.py::test_a_tracked_run_keeps_its_id_and_reads_what_the_run_has_written")
def test_wandb_writes_an_offline_run(run: Path) -> None:
    needs(Tracker.wandb)
    [event] = report(run, messages(run), track=["wandb"], WANDB_MODE="offline")
    assert "wandb sync uploads it" in event.get("location", ""), event
    [stored] = (run / "wandb").glob("offline-run-*/*.wandb")
    assert TrackedRun.open(run, worker=None, started_at=0.0).id in stored.name
    content = stored.read_bytes()
    assert b"throughput/decode_tokens_per_second" in content
    assert b"summary/measured.decode_useful" in content


@pytest.mark.slow("jobs/test_tracking.py::test_a_target_that_fails_is_reported_once_and_the_others_go_on")
def test_a_server_that_cannot_be_reached_is_reported_once(run: Path) -> None:
    needs(Tracker.mlflow)
    path = run.parent / "ws.prom"
    away = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    [event] = report(run, messages(run), track=["mlflow"], metrics_file=path, **away)
    assert event["target"] == "track=mlflow"
    assert "127.0.0.1" in event["problem"]
    assert "weightstream_run_exit_code" in path.read_text()


def test_a_target_that_fails_is_reported_once_and_the_others_go_on() -> None:
    events: list[Mapping[str, str]] = []

    class Failing:
        location = "there"

        def log(self, values: Mapping[str, float], at: float) -> None:
            raise SystemExit("gone\naway")

        def finish(self, status: str, exit_code: int | None) -> None:
            raise OSError(5, "still gone")

    target = reporter.Target("track=x", Failing, events.append)
    for message in ({"at": 1.0, "values": {}}, {"at": 2.0, "values": {}}, {"status": "finished", "exit_code": 0}):
        target.messages.put(message)
    target.run()
    assert events == [
        {"target": "track=x", "location": "there"},
        {"target": "track=x", "problem": "SystemExit: gone away"},
    ]


def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    """Puts this program in the place of the reporting process."""
    (tmp_path / "standing_in.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(feed, "MODULE", "standing_in")


def test_a_process_that_reads_nothing_never_holds_up_a_pass_and_is_killed_in_the_end(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, tmp_path, "import time\ntime.sleep(600)")
    monkeypatch.setattr(curves, "SECONDS_PER_POINT", 0.0)
    monkeypatch.setattr(feed, "EXIT_SECONDS", 0.3)
    monkeypatch.setattr(feed, "end_seconds", lambda status: 0.0)
    sending = RunFeed(run, [Tracker.tensorboard])
    sending.open(is_shared=False)
    process = sending._process
    assert process is not None
    for _ in range(1000):  # far more than a pipe holds
        sending.advance(PASSES[0])
    sending.close("finished", 0)
    process.wait(10)
    assert "track and metrics_file: not all was sent within 0.3" in caplog.text


def test_a_signal_ends_the_wait_for_a_tracker(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sent as soon as somebody waits. Without it the process ends by itself, before its time is up, and all is well."""
    stand_in(monkeypatch, tmp_path, "import time\ntime.sleep(120)")
    monkeypatch.setattr(feed, "end_seconds", lambda status: 3600.0)
    sending = RunFeed(run, [Tracker.tensorboard])
    # A job that runs in the background of a shell ignores it, and so would all processes of the tests.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    sending.open(is_shared=False)
    send, signals = sending._send, [signal.SIGINT]

    def interrupted(message: dict[str, object]) -> bool:
        while signals:
            os.kill(os.getpid(), signals.pop())
        return send(message)

    monkeypatch.setattr(sending, "_send", interrupted)
    try:
        sending.close("finished", 0)
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert not signals
    assert "not all was sent within" in caplog.text


def test_a_process_that_ends_early_is_reported_and_the_run_goes_on(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, tmp_path, "raise SystemExit(9)")
    monkeypatch.setattr(curves, "SECONDS_PER_POINT", 0.0)
    sending = RunFeed(run, [Tracker.tensorboard])
    sending.open(is_shared=False)
    assert sending._process is not None
    sending._process.wait(30)
    sending.advance(PASSES[0])
    sending.close("finished", 0)
    expected = "track and metrics_file: their process ended with exit code 9"
    assert [record.message for record in caplog.records] == [expected]


def test_what_cannot_be_followed_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**changes: object) -> str:
        with pytest.raises(ConfigError) as error:
            RunFollower(GenerateConfig(**changes), tmp_path)  # pyright: ignore[reportArgumentType]
        return str(error.value)

    assert "must end in .prom: node_exporter reads no other" in refused(metrics_file=str(tmp_path / "a.txt"))
    assert "there is no directory" in refused(metrics_file=str(tmp_path / "gone" / "a.prom"))
    monkeypatch.setattr("jobs.config.settings.find_spec", lambda name: None)
    text = "track=wandb needs the extra: pip install 'weightstream[wandb]'"
    assert refused(track=[Tracker.wandb]) == text


def test_the_command_of_the_end_is_in_no_file_of_a_run() -> None:
    settings = operational(GenerateConfig(on_end="curl https://example.org/secret", track=[Tracker.mlflow]))
    assert "on_end" not in settings
    assert settings["track"] == ["mlflow"]


def test_a_run_without_targets_starts_no_process(run: Path) -> None:
    sending = RunFeed(run)
    sending.open(is_shared=False)
    sending.advance(PASSES[0])
    sending.close("finished", 0)
    assert sending._process is None
    assert not (run / ".tracking.json").exists()


def test_rows_of_windows_add_up() -> None:
    sending = RunFeed()
    sending.expect(10, 4, 1)
    sending.finish_row("ok")
    sending.finish_row("error")
    assert (sending._curves.num_rows, sending._curves.num_done, sending._curves.num_errors) == (10, 6, 2)
    for _ in range(4):
        sending.finish_row("ok")
    sending.end_window()
    sending.expect(5, 0, 0)
    assert (sending._curves.num_rows, sending._curves.num_done, sending._curves.num_errors) == (15, 10, 2)
    sending.expect(5, 3)
    assert (sending._curves.num_done, sending._curves.num_errors) == (13, 2)


def test_the_end_of_a_run_is_told_by_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[str, int]] = []
    monkeypatch.setattr(RunFeed, "close", lambda self, status, code: ends.append((status, code)))
    for code in (0, 3):
        with RunFollower(GenerateConfig(), tmp_path) as follower:
            follower.exit_code = code
    for error in (Interrupted("stop"), ConfigError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)), RunFollower(GenerateConfig(), tmp_path):
            raise error
    assert ends == [("finished", 0), ("errors", 3), ("interrupted", 75), ("failed", 2), ("interrupted", 75)]


@pytest.mark.slow("jobs/test_tracking.py::test_a_run_that_is_over_is_sent_with_its_rows_at_the_end_of_each_block")
def test_report_sends_a_run_that_is_over(run: Path, tmp_path: Path) -> None:
    needs(Tracker.tensorboard)
    case = ShardedRun(folder=tmp_path / "sent").finish(0, passes=PASSES)
    [reader] = find_runs([str(case.directory(0).path)], "run")
    [line] = send_run(reader, ["tensorboard"])
    assert line == f"track=tensorboard: {reader.path / 'tensorboard'}"
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(reader.path / "tensorboard"))
    shown.Reload()
    assert shown.Scalars("progress/rows_done")[-1].value == 16
    with pytest.raises(ConfigError, match="the run was tracked: delete it to write it again"):
        list(send_run(reader, ["tensorboard"]))


def test_a_run_that_is_over_is_sent_with_its_rows_at_the_end_of_each_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ShardedRun(folder=tmp_path).finish(0, passes=PASSES)
    monkeypatch.setattr(curves, "SECONDS_PER_POINT", 0.0)
    sent: list[object] = []

    class Listening:
        location = "there"

        def __init__(self, tracked: TrackedRun):
            assert tracked.settings()["shard.count"] == NUM_SHARDS

        def log(self, values: Mapping[str, float], at: float) -> None:
            sent.append(values["progress/rows_done"])

        def finish(self, status: str, exit_code: int | None) -> None:
            sent.append((status, exit_code))

    monkeypatch.setattr(sending, "TRACKERS", {"mlflow": Listening})
    [reader] = find_runs([str(case.directory(0).path)], "run")
    assert list(send_run(reader, ["mlflow"])) == ["track=mlflow: there"]
    assert sent[-2:] == [16, ("finished", 0)]
    monkeypatch.setattr(Listening, "log", lambda *_: 1 / 0)
    with pytest.raises(OutputError, match="track=mlflow: ZeroDivisionError: division by zero"):
        list(send_run(reader, ["mlflow"]))
