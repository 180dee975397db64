"""Arrays of 4, 2 and 6 workers on one run, on real Slurm daemons: python -m tests.slurm_arrays.

The first array is cut off after some blocks, and each has a task that is requeued and one that is told to end, as by
preemption; the export waits for all of them. Its rows are those of one worker alone.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from jobs.config.settings import GenerateConfig, Workers
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.record.run_dir import RunDirectory
from jobs.run.tasks.generate import generate
from runtime.config.settings import PolicyConfig, PolicyKind, SamplingConfig
from tests.generations import read_generations
from tests.slurm_cluster import Cluster, running_cluster, written_script

ROOT = Path(__file__).resolve().parents[1]
SIZES, NUM_ROWS, NUM_NEW_TOKENS, BLOCK_ROWS = (4, 2, 6), 360, 64, 2
ENVIRONMENT = {"WEIGHTSTREAM_WORKERS": "elastic", "WEIGHTSTREAM_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
OPTIONS = ("--job-name=prompts", "--cpus-per-task=1", "--mem=1500M")


def rows() -> list[str]:
    """The prompts of the run."""
    return [json.dumps({"prompt": f"Q: Sort these numbers: {i} 7 3 A:"}) for i in range(NUM_ROWS)]


def settings() -> list[str]:
    """Those of the run."""
    policy = ["policy=fixed", f"policy.micro_batch_size={BLOCK_ROWS}", "policy.num_micro_batches=1"]
    sampling = [f"sampling.max_new_tokens={NUM_NEW_TOKENS}", "sampling.ignore_eos=true", "machine.num_threads=1"]
    return ["run=prompts", "dataset=jsonl", "dataset.path=prompts.jsonl", *policy, *sampling]


def num_parts(folder: Path) -> int:
    """How many blocks are committed."""
    return len(list((folder / "outputs/generate/prompts/generations").glob("part-*.parquet")))


def disturbed(cluster: Cluster, folder: Path, size: int, num_more: int) -> str:
    """An array of so many tasks, two of which are disturbed behind the first new block, once `num_more` are there."""
    target = num_parts(folder) + num_more
    script = written_script("generate", folder)
    array = cluster.submit(folder, *OPTIONS, f"--array=0-{size - 1}", script, *settings(), **ENVIRONMENT)
    until(folder, target - num_more + 1)
    cluster.ask("scontrol", "requeue", f"{array}_0")
    cluster.signal(f"{array}_1", "TERM")
    for task in (f"{array}_0", f"{array}_1"):
        cluster.hurry(task)
    until(folder, target)
    return array


def until(folder: Path, wanted: int) -> None:
    deadline = time.monotonic() + 300
    while num_parts(folder) < wanted:
        assert time.monotonic() < deadline, f"{num_parts(folder)} blocks are there, {wanted} were to be"
        time.sleep(0.2)


def main() -> None:
    with tempfile.TemporaryDirectory() as home, running_cluster(Path(home, "slurm"), num_cpus=3) as cluster:
        folder = Path(home, "project")
        (folder / "outputs").mkdir(parents=True)
        (folder / "prompts.jsonl").write_text("\n".join(rows()) + "\n")
        arrays = list[str]()
        for size in SIZES:
            arrays.append(disturbed(cluster, folder, size, num_more=NUM_ROWS // BLOCK_ROWS // 4))
            print(f"an array of {size}, two of its tasks disturbed: {num_parts(folder)} blocks", flush=True)
            if size != SIZES[-1]:
                cluster.ask("scancel", arrays[-1])
        exporting = cluster.submit(
            folder, *OPTIONS, "--dependency=singleton", written_script("export", folder),
            "run=outputs/generate/prompts", "out=answers.jsonl", **ENVIRONMENT,
        )  # fmt: skip
        for index in range(SIZES[-1]):
            cluster.wait(f"{arrays[-1]}_{index}", "COMPLETED", seconds=300)
        restarts = [int(cluster.facts(f"{arrays[-1]}_{index}")["Restarts"]) for index in range(SIZES[-1])]
        cluster.wait(exporting, "COMPLETED", seconds=120)
        answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
        assert [row["id"] for row in answers] == [str(i) for i in range(NUM_ROWS)]
        os.chdir(folder)
        generate(alone(), lambda: False)
        shared, one = (
            read_generations(RunDirectory(path=folder / f"outputs/generate/{n}")) for n in ("prompts", "one")
        )
        assert shared.equals(one), "the arrays' rows are not those of one worker"
    print(f"{NUM_ROWS} rows, each once and as one worker makes them; restarts of the last array's tasks: {restarts}")


def alone() -> GenerateConfig:
    """The run of one worker."""
    return GenerateConfig(
        run="one",
        dataset=DatasetConfig(kind=DatasetKind["jsonl"], path="prompts.jsonl"),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=BLOCK_ROWS, num_micro_batches=1),
        sampling=SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True),
        workers=Workers.one,
    )


if __name__ == "__main__":
    main()
