"""Runs side by side: what differs, what each came to, and how far it is."""

import shutil
from dataclasses import fields, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir

from jobs.config.settings import load
from jobs.files.locks import RunLock
from jobs.record.run_reader import find_runs
from jobs.reporting.config import ReportConfig
from jobs.reporting.figures import RunFigures
from jobs.reporting.overview import make_overview, write_overview
from jobs.reporting.settings import differing_keys, effective_settings
from runtime.errors import ConfigError
from runtime.units import GIB
from tests.jobs.part_support import PASSES
from tests.jobs.sharded_run import NUM_SHARDS, ShardedRun

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def case(tmp_path: Path) -> ShardedRun:
    return ShardedRun(folder=tmp_path / "generate").finish(*range(NUM_SHARDS), passes=PASSES)


def figures(*names: object) -> list[RunFigures]:
    return [RunFigures(run=run) for run in find_runs([str(name) for name in names], "run")]


def cells(text: str) -> dict[str, list[str]]:
    """The cells of a text table by the name of the line; columns are two blanks apart."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {name: rest for name, *rest in lines}


def test_a_line_holds_what_the_passes_come_to(case: ShardedRun) -> None:
    lines = cells(make_overview(figures(case.directory(0).path)).text(400))
    assert lines["run"] == [
        "state", "rows", "errors", "elapsed", "in passes", "rows/min", "prefill tok/s", "decode tok/s",
        "tokens", "peak memory",
    ]  # fmt: skip
    # 16 rows in 4 blocks, each of 2 passes of half a second: 4 prompt tokens in one, 3 useful tokens in the other
    assert lines["shard 0 of 3"] == ["done", "16", "0", "4 s", "4 s", "240.0", "8.0", "6.0", "24", "unknown"]


def test_shards_stand_under_their_run_with_their_states(case: ShardedRun) -> None:
    case.directory(1).success.unlink()
    case.directory(1).generations_part(3).unlink()
    shutil.rmtree(case.directory(2).path)
    lock = RunLock(case.directory(0).lock)
    lines = cells(make_overview(figures(case.folder / "x-*")).text(400))
    assert lines["x"][0] == "0 of 3 shards done; 0 running; 1 interrupted; 2 missing"
    assert lines["shard 0 of 3"][0] == "running, 16 of 16 rows"
    assert lines["shard 1 of 3"][:2] == ["interrupted, 12 of 16 rows", "12 of 16"]
    assert lines["x"][1:3] == ["28", "0"]
    lock.release()
    assert cells(make_overview(figures(case.folder / "x-*")).text(400))["shard 0 of 3"][0] == "done"


def test_a_run_took_as_much_memory_as_the_shard_that_took_most(tmp_path: Path) -> None:
    case = ShardedRun(folder=tmp_path / "generate")
    for shard, (host, device) in enumerate([(3 * GIB, GIB), (GIB, 5 * GIB), (2 * GIB, 2 * GIB)]):
        case.finish(shard, passes=[replace(each, peak_host_bytes=host, peak_device_bytes=device) for each in PASSES])
    lines = cells(make_overview(figures(case.folder / "x-*")).text(400))
    assert lines["shard 0 of 3"][-1] == "3 GiB + 1 GiB device"
    assert lines["x"][-1] == "3 GiB + 5 GiB device"


def test_a_damaged_run_says_what_is_wrong_and_the_others_are_told_all_the_same(case: ShardedRun) -> None:
    case.directory(0).generations_part(1).unlink()
    (case.directory(1).path / "plan.parquet").write_bytes(b"PAR1")
    lines = cells(make_overview(figures(case.folder / "x-*")).text(1000))
    assert lines["shard 0 of 3"][0] == "damaged: _SUCCESS.json lists part-00001.parquet, which is missing"
    assert lines["shard 1 of 3"][0].startswith("damaged: ")
    assert lines["shard 2 of 3"][0] == "done"


def test_settings_that_differ_are_columns_and_those_that_are_alike_are_none(tmp_path: Path) -> None:
    common = {"model.name": "tiny", "sampling.n": 2}
    for name, identity in {
        "a": common, "b": {**common, "sampling.temperature": 0.7}, "c": {**common, "policy.kind": "fixed|<b>"},
    }.items():  # fmt: skip
        ShardedRun(folder=tmp_path / name, identity=identity).finish(0)
        (tmp_path / name / "x-00000-of-00003").rename(tmp_path / name / name)
    table = make_overview(figures(tmp_path / "*" / "[abc]"))
    assert table.keys == ["policy.kind", "sampling.temperature"]
    assert table.text(200).splitlines()[0].split()[:4] == ["run", "policy.kind", "sampling.temperature", "state"]
    assert "| fixed\\|<b> |" in table.markdown()
    assert table.table()["sampling.temperature"].to_pylist() == ["", "0.7", ""]


def test_a_setting_of_many_lines_stays_in_its_line(tmp_path: Path) -> None:
    for name, prompt in (("a", "Be brief.\n\x1b[2J" + "x" * 100), ("b", None)):
        ShardedRun(folder=tmp_path / name, identity={"dataset.system_prompt": prompt}).finish(0)
    text = make_overview(figures(tmp_path / "*" / "x-*")).text(400)
    assert text.count("\n") == 4, "a head, and for each of two runs its line and its shard's"
    assert [line.split()[0] for line in text.splitlines()[1::2]] == [str(tmp_path / name / "x") for name in "ab"]
    assert "\x1b" not in text
    assert '"Be brief.\\n\\u001b[2Jxxx' in text


def test_a_key_that_an_older_run_lacks_has_its_default() -> None:
    assert differing_keys([{"model.compile": False}, {}]) == []
    assert differing_keys([{"model.compile": True}, {}]) == ["model.compile"]


def test_settings_without_effect_in_a_run_are_blank_and_of_none_not_shown() -> None:
    csv = {"dataset.kind": "csv", "dataset.path": "a.csv", "dataset.template": "{q}", "dataset.prompt_field": "prompt"}
    few = {"dataset.few_shot_path": "b.csv", "dataset.few_shot_template": "{q}", "dataset.num_examples": 2}
    plain = {**csv, "dataset.num_examples": 5, "dataset.few_shot_path": None, "dataset.few_shot_template": None}
    prompt = {"dataset.kind": "prompt", "dataset.prompt": "Hello", "dataset.num_examples": 5, "dataset.path": None}
    assert "dataset.num_examples" not in effective_settings(plain)
    assert "dataset.num_examples" in effective_settings({**csv, **few})
    assert "dataset.prompt_field" not in effective_settings(csv), "the template takes its place"
    assert differing_keys([plain, prompt]) == ["dataset.path", "dataset.prompt", "dataset.template"]
    assert "dataset.num_examples" in differing_keys([{**csv, **few}, plain])


def test_a_table_is_no_wider_than_the_screen_and_shortens_digests(tmp_path: Path) -> None:
    for name in ("a", "b"):
        ShardedRun(folder=tmp_path / name, identity={"weights": name * 64, "offload.cache_dir": name * 39}).finish(0)
        (tmp_path / name / "x-00000-of-00003").rename(tmp_path / name / name)
    table = make_overview(figures(tmp_path / "*" / "[ab]"))
    for width in (80, 120):
        text = table.text(width)
        assert max(map(len, text.splitlines())) <= width
        *tables, settings = text.split("\n\n")
        assert all(table.startswith("run ") for table in tables)
        assert settings.startswith("settings that differ")
    assert f"weights={'a' * 10}\n" in table.text() or f"weights={'a' * 10} " in table.text()
    assert "a" * 41 not in table.text()
    assert "\n\n" not in table.text(300)
    assert table.text(300).splitlines()[0].split()[:3] == ["run", "offload.cache_dir", "weights"]


def test_the_files_of_a_report_hold_plain_numbers_a_table_and_a_picture(case: ShardedRun, tmp_path: Path) -> None:
    table = make_overview(figures(case.folder / "x-*"))
    (tmp_path / "out").mkdir()
    names = [path.name for path in write_overview(table, tmp_path / "out")]
    assert names == ["table.md", "table.parquet", "rates.png"]
    rows = pq.read_table(tmp_path / "out" / "table.parquet").to_pylist()
    assert [(row["shard"], row["num_done"], row["seconds"]) for row in rows] == [
        (0, 16, 4.0),
        (1, 16, 4.0),
        (2, 16, 4.0),
    ]
    assert {row["decode_tokens_per_second"] for row in rows} == {6.0}
    assert sum(row["num_errors"] for row in rows) == 2
    assert (tmp_path / "out" / "table.md").read_text().count("\n") == 2 + 1 + 3
    assert (tmp_path / "out" / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_elapsed_is_the_time_on_the_wall_where_passes_say_when_they_were(tmp_path: Path) -> None:
    begun = [replace(row, started_at=1e9, since_start_seconds=3.0 + i) for i, row in enumerate(PASSES)]
    case = ShardedRun(folder=tmp_path).finish(0, passes=begun)
    assert cells(make_overview(figures(case.directory(0).path)).text(400))["shard 0 of 3"][3:5] == ["4 s", "4 s"]
    [row] = make_overview(figures(case.directory(0).path)).table().to_pylist()
    assert row["elapsed_seconds"] == 4.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [({}, "run is not set"), ({"run": []}, "run is not set"), ({"run": "x", "samples": -1}, "samples must be 0")],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReportConfig(**settings)  # pyright: ignore[reportArgumentType]


def test_the_settings_of_a_report_are_those_of_the_yaml() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        composed = compose("report", ["run=[a,b]"])
    assert set(composed) == {each.name for each in fields(ReportConfig)}
    assert load(ReportConfig, composed) == replace(ReportConfig(run="x"), run=["a", "b"])
