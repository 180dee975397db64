"""A run with continuous admission: the rows of a run in waves, each once, however often it was stopped or killed."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig
from jobs.record.run_dir import RunDirectory
from jobs.record.summary import Outcome
from jobs.run.tasks.generate import generate
from runtime.config.settings import Admission, PolicyConfig, PolicyKind, SamplingConfig
from runtime.errors import Interrupted
from tests.generations import read_generations
from tests.jobs.killing import run_and_kill, start_job

NUM_KILLS = 3
SAMPLED = SamplingConfig(max_new_tokens=10, temperature=0.9, seed=5, logprobs=2)


def policy(admission: Admission) -> PolicyConfig:
    return PolicyConfig(
        kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=2, prefill_chunk_tokens=24, admission=admission
    )


def config(
    output_root: Path,
    *,
    name: str = "case",
    admission: Admission = Admission.continuous,
    sampling: SamplingConfig = SAMPLED,
    num_rows: int = 12,
    checkpoint_seconds: float = 0.0,
) -> GenerateConfig:
    return GenerateConfig(
        run=name,
        output_root=str(output_root),
        dataset=DatasetConfig(limit=num_rows),
        policy=policy(admission),
        sampling=sampling,
        checkpoint_seconds=checkpoint_seconds,
    )


def run(
    output_root: Path,
    *,
    admission: Admission = Admission.continuous,
    sampling: SamplingConfig = SAMPLED,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    return generate(config(output_root, admission=admission, sampling=sampling), should_stop)


def directory(output_root: Path, name: str = "case") -> RunDirectory:
    return RunDirectory(path=output_root / "generate" / name)


def tokens_by_id(run_directory: RunDirectory) -> dict[str, list[int]]:
    table = read_generations(run_directory)
    tokens = dict(zip(table["id"].to_pylist(), table["token_ids"].to_pylist(), strict=True))
    assert len(tokens) == table.num_rows, "a row is there twice"
    return tokens


def throughput(run_directory: RunDirectory) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in sorted(run_directory.throughput.iterdir()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A sampled run that nothing stopped."""
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("sampling", [SamplingConfig(max_new_tokens=10), SAMPLED], ids=["greedy", "sampled"])
def test_the_rows_are_those_of_a_run_in_waves(tmp_path: Path, sampling: SamplingConfig) -> None:
    run(tmp_path / "waves", admission=Admission.wave, sampling=sampling)
    outcome = run(tmp_path / "continuous", sampling=sampling)
    assert outcome.exit_code == 0
    assert tokens_by_id(directory(tmp_path / "continuous")) == tokens_by_id(directory(tmp_path / "waves"))
    assert not directory(tmp_path / "continuous").run_checkpoint.exists()


def test_the_summary_accounts_for_every_token(whole: Outcome) -> None:
    summary, run_directory = whole.summary, RunDirectory(path=whole.directory)
    generated = tokens_by_id(run_directory)
    prompts = read_generations(run_directory)["num_prompt_tokens"].to_pylist()
    assert summary.useful_tokens == sum(map(len, generated.values()))
    assert summary.prompt_tokens == sum(prompts)
    assert summary.prefill_seconds > 0
    assert summary.decode_seconds > 0
    phases = throughput(run_directory)["phase"].to_pylist()
    assert "mixed" in phases


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("num_stages", [30, 150])
def test_a_stopped_run_goes_on_and_no_token_is_sampled_twice(tmp_path: Path, num_stages: int, whole: Outcome) -> None:
    asked = iter(range(num_stages))
    with pytest.raises(Interrupted):
        run(tmp_path, should_stop=lambda: next(asked, None) is None)
    outcome = run(tmp_path)
    tokens = tokens_by_id(directory(tmp_path))
    assert tokens == tokens_by_id(RunDirectory(path=whole.directory))
    assert outcome.summary.useful_tokens == sum(map(len, tokens.values()))
    indices = throughput(directory(tmp_path))["pass_index"].to_pylist()
    assert sorted(indices) == list(range(len(indices)))


@pytest.mark.slow(
    "jobs/test_continuous_killed.py::test_killed_at_every_step_and_again_while_resuming_a_run_ends_with_the_same_bytes"
)
def test_killed_three_times_a_run_ends_with_the_rows_of_an_uninterrupted_one(tmp_path: Path) -> None:
    def long(name: str) -> GenerateConfig:
        sampling = SamplingConfig(max_new_tokens=24, ignore_eos=True)
        return config(tmp_path, name=name, sampling=sampling, num_rows=24, checkpoint_seconds=0.05)

    generate(long("whole"), lambda: False)
    checkpoint, moments = directory(tmp_path, "killed").run_checkpoint, random.Random(7)
    for _ in range(NUM_KILLS):
        before = changed_at(checkpoint)
        run_and_kill(
            long("killed"),
            lambda before=before: changed_at(checkpoint) > before,  # so that every start gets somewhere
            after_seconds=moments.uniform(0, 0.1),
        )
    generate(long("killed"), lambda: False)
    assert tokens_by_id(directory(tmp_path, "killed")) == tokens_by_id(directory(tmp_path, "whole"))
    assert not [path for path in tmp_path.rglob(".*") if "tmp" in path.name]
    indices = throughput(directory(tmp_path, "killed"))["pass_index"].to_pylist()
    assert len(set(indices)) == len(indices)


def changed_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def test_sigterm_ends_the_process_with_75_and_a_checkpoint(tmp_path: Path) -> None:
    process = start_job(
        *("run=stopped", f"output_root={tmp_path}", "policy=fixed", "policy.admission=continuous"),
        *("policy.micro_batch_size=2", "policy.num_micro_batches=2", "checkpoint_seconds=0.05"),
        *("dataset.limit=24", "sampling.max_new_tokens=48", "sampling.ignore_eos=true"),
    )
    checkpoint = directory(tmp_path, "stopped").run_checkpoint
    while process.is_alive() and not checkpoint.exists():
        time.sleep(0.01)
    process.terminate()
    process.join(timeout=60)
    assert process.exitcode == 75
    assert checkpoint.exists()
