"""What one input row comes to: `sampling.n` output rows, each with its own settings, whatever became of it."""

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig, DatasetKind, ShardConfig
from jobs.record.run_dir import RunDirectory
from jobs.record.summary import Outcome
from jobs.run.tasks.generate import generate
from runtime.config.settings import PolicyConfig, PolicyKind, SamplingConfig
from runtime.errors import Interrupted, RunMismatchError
from tests.generations import read_generations

SMALL_BLOCKS = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=2)
THREE = SamplingConfig(n=3, temperature=0.9, max_new_tokens=5, ignore_eos=True)
LINES = [
    {"id": "a", "prompt": "one"},
    {"id": "bad"},
    {"id": "b", "prompt": "two", "limit": 2},
    {"id": "c", "prompt": "three", "limit": 9, "heat": 0},
    {"id": "worse", "prompt": "four", "limit": "many"},
    {"id": "d", "prompt": "five", "until": ["x"], "heat": 1.5},
]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def config(
    output_root: Path, path: Path, sampling: SamplingConfig, *, own: bool = False, **changes: object
) -> GenerateConfig:
    fields = {"max_new_tokens_field": "limit", "temperature_field": "heat", "stop_field": "until"} if own else {}
    dataset = DatasetConfig(kind=DatasetKind.jsonl, path=str(path), id_field="id", **fields)
    values: dict[str, object] = {"run": "case", "output_root": str(output_root), "policy": SMALL_BLOCKS}
    return GenerateConfig(dataset=dataset, sampling=sampling, **(values | changes))  # pyright: ignore


def run(output_root: Path, path: Path, sampling: SamplingConfig, *, own: bool = False, **changes: object) -> Outcome:
    return generate(config(output_root, path, sampling, own=own, **changes), lambda: False)


def rows(output_root: Path, name: str = "case") -> pa.Table:
    return read_generations(RunDirectory(path=output_root / "generate" / name))


def tokens(table: pa.Table) -> Mapping[tuple[str, int], list[int]]:
    keys = zip(table["id"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
    return dict(zip(keys, table["token_ids"].to_pylist(), strict=True))


def test_every_row_comes_out_once_for_each_sample_error_rows_too(tmp_path: Path, lines: Path) -> None:
    outcome = run(tmp_path, lines, THREE)
    table = rows(tmp_path)
    assert sorted(tokens(table)) == sorted((str(line["id"]), sample) for line in LINES for sample in range(3))
    assert table.num_rows == 3 * len(LINES)
    assert outcome.summary.rows == {"ok": 15, "error": 3, "skipped": 0}
    assert outcome.exit_code == 3
    bad = [row for row in table.to_pylist() if row["id"] == "bad"]
    assert [row["sample_index"] for row in bad] == [0, 1, 2]
    assert len({row["error"] for row in bad}) == 1
    assert len({tuple(tokens(table)["a", sample]) for sample in range(3)}) > 1


def test_the_first_sample_is_that_of_a_run_with_one(tmp_path: Path, lines: Path) -> None:
    run(tmp_path / "three", lines, THREE)
    run(tmp_path / "one", lines, SamplingConfig(temperature=0.9, max_new_tokens=5, ignore_eos=True))
    three = tokens(rows(tmp_path / "three"))
    assert tokens(rows(tmp_path / "one")) == {key: value for key, value in three.items() if key[1] == 0}


def test_a_stopped_run_goes_on_with_every_sample_in_its_seat(tmp_path: Path, lines: Path) -> None:
    run(tmp_path / "whole", lines, THREE, own=True)
    directory = tmp_path / "stopped" / "generate" / "case"
    with pytest.raises(Interrupted):  # in the second block
        generate(
            config(tmp_path / "stopped", lines, THREE, own=True), lambda: any(directory.glob("generations/*.parquet"))
        )
    plan = (directory / "plan.parquet").read_bytes()
    assert 0 < rows(tmp_path / "stopped").num_rows < 3 * len(LINES)
    run(tmp_path / "stopped", lines, THREE, own=True)
    assert rows(tmp_path / "stopped").equals(rows(tmp_path / "whole"))
    assert (directory / "plan.parquet").read_bytes() == plan
    assert run(tmp_path / "stopped", lines, THREE, own=True).was_finished


@pytest.mark.slow("jobs/test_samples.py::test_every_row_comes_out_once_for_each_sample_error_rows_too")
def test_shards_partition_rows_with_all_their_samples(tmp_path: Path, lines: Path) -> None:
    run(tmp_path, lines, THREE)
    sharded: dict[tuple[str, int], list[int]] = {}
    for index in range(2):
        run(tmp_path, lines, THREE, shard=ShardConfig(index=index, count=2))
        part = tokens(rows(tmp_path, f"case-{index:05d}-of-00002"))
        assert not sharded.keys() & part.keys()
        assert {sample for _, sample in part} == {0, 1, 2}
        sharded |= part
    assert sharded == tokens(rows(tmp_path))


def test_rows_get_their_own_limit_temperature_and_stop_strings(tmp_path: Path, lines: Path) -> None:
    sampling = SamplingConfig(temperature=0.9, max_new_tokens=5, ignore_eos=True)
    assert run(tmp_path / "own", lines, sampling, own=True).exit_code == 3
    own, plain = tokens(rows(tmp_path / "own")), {}
    for heat in (0.0, 0.9, 1.5):  # each row of a run whose only settings are that row's
        run(tmp_path / f"{heat}", lines, SamplingConfig(temperature=heat, max_new_tokens=9, ignore_eos=True))
        plain[heat] = tokens(rows(tmp_path / f"{heat}"))
    assert own["a", 0] == plain[0.9]["a", 0][:5]
    assert own["b", 0] == plain[0.9]["b", 0][:2]
    assert own["c", 0] == plain[0.0]["c", 0]
    assert own["d", 0] == plain[1.5]["d", 0][: len(own["d", 0])]
    [worse] = [row for row in rows(tmp_path / "own").to_pylist() if row["id"] == "worse"]
    assert "'limit' (dataset.max_new_tokens_field)" in worse["error"]


def test_a_greedy_row_is_an_error_row_where_several_samples_are_asked_for(tmp_path: Path, lines: Path) -> None:
    run(tmp_path, lines, THREE, own=True)
    errors = {row["id"]: row["error"] for row in rows(tmp_path).to_pylist() if row["status"] == "error"}
    assert set(errors) == {"bad", "worse", "c"}
    assert "sampling.n=3 needs sampling.temperature above 0" in errors["c"]


def test_a_changed_value_of_a_rows_own_setting_is_another_run(tmp_path: Path, lines: Path) -> None:
    run(tmp_path, lines, THREE, own=True)
    lines.write_text(lines.read_text().replace('"limit": 2', '"limit": 3'))
    with pytest.raises(RunMismatchError, match="input: "):
        run(tmp_path, lines, THREE, own=True)


def test_log_probabilities_are_columns_of_the_parts_beside_the_tokens(tmp_path: Path, lines: Path) -> None:
    settings = {"max_new_tokens": 4, "ignore_eos": True}
    run(tmp_path / "plain", lines, SamplingConfig(**settings))
    run(tmp_path / "asked", lines, SamplingConfig(**settings, logprobs=3))
    plain, asked = rows(tmp_path / "plain"), rows(tmp_path / "asked")
    assert set(asked.column_names) - set(plain.column_names) == {"logprobs", "top_token_ids", "top_logprobs"}
    assert asked.select(plain.column_names).equals(plain)
    for row in asked.to_pylist():
        assert len(row["logprobs"]) == len(row["top_logprobs"]) == len(row["top_token_ids"]) == len(row["token_ids"])
        for own, token, top_ids, top in zip(
            row["logprobs"], row["token_ids"], row["top_token_ids"], row["top_logprobs"], strict=True
        ):
            assert (top_ids[0], top[0]) == (token, own)  # greedy
            assert len(top) == 3
            assert top == sorted(top, reverse=True)
            assert top[0] < 0
    assert run(tmp_path / "asked", lines, SamplingConfig(**settings, logprobs=3)).was_finished


def test_a_part_with_a_changed_log_probability_is_made_again(tmp_path: Path, lines: Path) -> None:
    sampling = SamplingConfig(max_new_tokens=4, ignore_eos=True, logprobs=2)
    run(tmp_path, lines, sampling)
    before, directory = rows(tmp_path), tmp_path / "generate" / "case"
    part = directory / "generations" / "part-00000.parquet"
    table = pq.read_table(part)
    pq.write_table(table.drop_columns(["top_logprobs"]), part)
    assert not run(tmp_path, lines, sampling).was_finished
    assert rows(tmp_path).equals(before)
    assert list((directory / "quarantine").iterdir())
