"""The contract of a run: every row once, the same rows however often it was killed, nothing rewritten."""

import json
import logging
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig, DatasetKind, ShardConfig
from jobs.packing.config import PackConfig, SourceConfig
from jobs.packing.packing import pack
from jobs.record.run_dir import RunDirectory
from jobs.record.summary import Outcome
from jobs.run.summary_table import format_table
from jobs.run.tasks.generate import generate
from runtime.checkpoint_source.location import BUNDLED
from runtime.config.settings import (
    KVConfig,
    KVDType,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    Prefetch,
    PrefetchConfig,
    SamplingConfig,
    Tier,
)
from runtime.errors import Interrupted, RunMismatchError
from runtime.plan.schedule.actions import Op, parse_action
from tests.generations import read_generations
from tests.jobs.killing import run_and_kill

ROOT = Path(__file__).resolve().parents[2]
SMALL_BLOCKS = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=2)
NUM_KILLS = 3
SAMPLE = DatasetKind["sample"]


def config(output_root: Path, **changes: object) -> GenerateConfig:
    values: dict[str, object] = {
        "run": "case",
        "output_root": str(output_root),
        "dataset": DatasetConfig(kind=SAMPLE, limit=12),
        "policy": SMALL_BLOCKS,
        "sampling": SamplingConfig(max_new_tokens=6),
    }
    return GenerateConfig(**(values | changes))  # pyright: ignore[reportArgumentType]


def run(output_root: Path, **changes: object) -> Outcome:
    return generate(config(output_root, **changes), lambda: False)


def rows(output_root: Path, name: str = "case") -> pa.Table:
    return read_generations(RunDirectory(path=output_root / "generate" / name))


def tokens_by_id(table: pa.Table) -> Mapping[str, list[int]]:
    return dict(zip(table["id"].to_pylist(), table["token_ids"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The rows of a run that nothing was changed of."""
    output_root = tmp_path_factory.mktemp("plain")
    run(output_root)
    return rows(output_root)


def test_killed_three_times_a_run_ends_with_the_rows_of_an_uninterrupted_one(tmp_path: Path) -> None:
    long = {
        "dataset": DatasetConfig(kind=SAMPLE, limit=24),
        "sampling": SamplingConfig(max_new_tokens=12, ignore_eos=True),
    }
    run(tmp_path, **long, run="whole")
    folder, moments = tmp_path / "generate" / "killed" / "generations", random.Random(7)
    for _ in range(NUM_KILLS):
        before = num_parts(folder)
        run_and_kill(
            config(tmp_path, **long, run="killed"),
            lambda before=before: num_parts(folder) > before,  # so that every start gets somewhere
            after_seconds=moments.uniform(0, 0.1),
        )
    run(tmp_path, **long, run="killed")
    assert rows(tmp_path, "killed").equals(rows(tmp_path, "whole"))
    assert len(set(rows(tmp_path, "killed")["id"].to_pylist())) == 24
    assert not [path for path in tmp_path.rglob(".*") if "tmp" in path.name]


def num_parts(folder: Path) -> int:
    return len(list(folder.glob("*.parquet")))


def test_a_stopped_run_exits_resumable_and_goes_on_with_equal_rows(tmp_path: Path, plain: pa.Table) -> None:
    asked = iter([False] * 40 + [True] * 1000)
    with pytest.raises(Interrupted) as stopped:
        generate(config(tmp_path), lambda: next(asked))
    assert stopped.value.exit_code == 75
    run(tmp_path)
    assert rows(tmp_path).equals(plain)


@pytest.mark.slow("jobs/test_continuous.py::test_sigterm_ends_the_process_with_75_and_a_checkpoint")
def test_sigterm_ends_the_process_with_75_and_nothing_is_written_beside_the_run_directory(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "jobs.generate", f"output_root={tmp_path}", "policy=fixed"),
        *("policy.micro_batch_size=2", "policy.num_micro_batches=2", "sampling.ignore_eos=true"),
        *("dataset=sample", "dataset.limit=24", "sampling.max_new_tokens=48"),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.rglob("part-*.parquet")):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    assert [path.name for path in tmp_path.iterdir()] == ["generate"]
    assert len(list(tmp_path.glob("generate/*"))) == 1


def test_a_finished_run_says_so_and_changes_nothing(tmp_path: Path) -> None:
    assert not run(tmp_path).was_finished
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}
    again = run(tmp_path)
    assert again.was_finished
    assert again.exit_code == 0
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}
    assert {k: v for k, v in after.items() if "lock" not in k.name} == {
        k: v for k, v in before.items() if "lock" not in k.name
    }


def test_a_changed_semantic_key_is_refused_with_a_diff_and_rewrites_nothing(tmp_path: Path) -> None:
    run(tmp_path)
    before = rows(tmp_path)
    with pytest.raises(RunMismatchError, match=r"sampling\.max_new_tokens: 6 -> 7") as refused:
        run(tmp_path, sampling=SamplingConfig(max_new_tokens=7))
    assert refused.value.exit_code == 2
    assert rows(tmp_path).equals(before)


def test_tier_and_prefetch_may_change_on_resume(tmp_path: Path, plain: pa.Table) -> None:
    asked = iter([False] * 40 + [True] * 1000)
    with pytest.raises(Interrupted):
        generate(config(tmp_path), lambda: next(asked))
    run(
        tmp_path,
        offload=OffloadConfig(tier=Tier.nvme, resident_layers=1),
        prefetch=PrefetchConfig(kind=Prefetch.block),
    )
    assert rows(tmp_path).equals(plain)


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("kind", Prefetch)
def test_every_tier_and_prefetch_gives_the_same_rows(
    tier: Tier, kind: Prefetch, tmp_path: Path, plain: pa.Table
) -> None:
    run(tmp_path, offload=OffloadConfig(tier=tier, resident_layers=1), prefetch=PrefetchConfig(kind=kind))
    assert rows(tmp_path).equals(plain)


def test_a_run_keeps_its_schedule_and_what_it_resolved_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        run(tmp_path, offload=OffloadConfig(tier=Tier.nvme, resident_layers=1))
    directory = RunDirectory(path=tmp_path / "generate" / "case")
    lines = directory.schedule.read_text().splitlines()
    actions = [parse_action(line) for line in lines if not line.startswith("#")]
    assert {Op.read, Op.run, Op.free} <= {action.op for action in actions}
    summary = json.loads(directory.summary.read_text())
    plan = summary["plan"]
    [host] = summary["ledgers"]
    assert (host["memory"], host["budget_key"]) == ("host", "offload.host_memory_gib")
    assert 0 < sum(entry["num_bytes"] for entry in host["entries"]) < summary["planned"]["host_bytes"]
    assert (plan["num_lanes"], plan["weights"], plan["kv"], plan["prefetch"]) == (2, "nvme", "device", "lookahead")
    assert any(record.message.startswith("plan:") for record in caplog.records)


def test_shards_partition_the_rows(tmp_path: Path, plain: pa.Table) -> None:
    parts = []
    for index in range(3):
        run(tmp_path, shard=ShardConfig(index=index, count=3))
        parts.append(rows(tmp_path, f"case-{index:05d}-of-00003"))
    sharded = pa.concat_tables(parts)
    assert sorted(sharded["id"].to_pylist()) == sorted(plain["id"].to_pylist())
    assert tokens_by_id(sharded) == tokens_by_id(plain)
    assert sorted(sharded["row_index"].to_pylist()) == list(range(12)), "places in the whole input"
    assert set(sharded["source_file"].to_pylist()) == {"sample.jsonl"}


def test_columns_are_passed_through_and_chat_templates_are_rendered(tmp_path: Path, plain: pa.Table) -> None:
    run(tmp_path, dataset=DatasetConfig(kind=SAMPLE, limit=12, chat_template=True, system_prompt="Be brief."))
    assert {"category", "turns"} <= set(plain.column_names)
    assert all(a > b for a, b in zip(_prompt_tokens(rows(tmp_path)), _prompt_tokens(plain), strict=True))


def _prompt_tokens(table: pa.Table) -> list[int]:
    return table.sort_by("id")["num_prompt_tokens"].to_pylist()


def test_samples_follow_the_seed_and_not_the_place_in_a_batch(tmp_path: Path) -> None:
    sampled = SamplingConfig(max_new_tokens=6, temperature=0.8, seed=3)
    run(tmp_path / "a", sampling=sampled)
    run(tmp_path / "b", sampling=sampled, policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=5))
    run(tmp_path / "c", sampling=SamplingConfig(max_new_tokens=6, temperature=0.8, seed=4))
    assert tokens_by_id(rows(tmp_path / "a")) == tokens_by_id(rows(tmp_path / "b"))
    assert tokens_by_id(rows(tmp_path / "a")) != tokens_by_id(rows(tmp_path / "c"))


def test_policy_auto_gives_the_same_rows_as_fixed(tmp_path: Path, plain: pa.Table) -> None:
    run(tmp_path, policy=PolicyConfig())
    assert tokens_by_id(rows(tmp_path)) == tokens_by_id(plain)


def test_a_finished_run_says_in_which_class_of_error_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    pack(PackConfig(model=SourceConfig(path=str(BUNDLED)), out=str(tmp_path / "store")), lambda *_: None)
    packed = ModelConfig(name="packed", path=str(tmp_path / "store"))
    table = format_table(run(tmp_path, model=packed, kv=KVConfig(dtype=KVDType.int8)).summary)
    said = {"weights": "window4: lossless, same bits as published", "keys and values": "int8: lossy"}
    assert f"precision weights {said['weights']}; KV {said['keys and values']}" in caplog.text
    lines = {line.partition("  ")[0]: line.rpartition("  ")[2].strip() for line in table.splitlines()}
    assert lines.items() >= said.items()
    directory = RunDirectory(path=tmp_path / "generate" / "case")
    found, summary = json.loads(directory.success.read_text())["numbers"], json.loads(directory.summary.read_text())
    assert found == {
        "weight_formats": ["window4"],
        "weight_loss": "lossless",
        "weight_error": None,
        "kv_dtype": "int8",
        "kv_loss": "lossy",
    }
    assert {key: summary["plan"][key] for key in found} == found
