"""Ranks in two nodes of a real Slurm, on one run: python -m tests.slurm_ranks.

`srun` starts one in each node; an urgent job takes both nodes in the middle of a block, and the job goes on by itself,
as it is requeued. Its rows are those of one process.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.record.run_dir import RunDirectory
from jobs.run.tasks.generate import generate
from runtime.config.settings import OffloadConfig, PolicyConfig, PolicyKind, SamplingConfig, Tier
from tests.generations import read_generations
from tests.slurm_cluster import Cluster, running_cluster

ROOT = Path(__file__).resolve().parents[1]
NUM_ROWS, NUM_NEW_TOKENS, BLOCK_ROWS = 24, 200, 6
SETTINGS = (
    *("run=ranks", "devices=sharded", "offload=nvme", "offload.resident_layers=0", "dataset=sample"),
    *(f"dataset.limit={NUM_ROWS}", "policy=fixed", f"policy.micro_batch_size={BLOCK_ROWS}"),
    *("policy.num_micro_batches=1", f"sampling.max_new_tokens={NUM_NEW_TOKENS}", "sampling.ignore_eos=true"),
    *("checkpoint_seconds=0.2", "machine.num_threads=1"),
)
OPTIONS = ("--job-name=ranks", "--nodes=2", "--ntasks=2", "--cpus-per-task=1", "--mem=1500M", "--requeue")


def submit(cluster: Cluster, folder: Path) -> str:
    """The id of the job. The nodes of this cluster have no address of their own."""
    job = f"srun --kill-on-bad-exit=1 {sys.executable} -m jobs.generate {' '.join(SETTINGS)}"
    logs = ("--open-mode=append", "--output=ranks.log")
    return cluster.submit(folder, *OPTIONS, *logs, f"--wrap={job}", PYTHONPATH=str(ROOT), MASTER_ADDR="127.0.0.1")


def until_begun(run: Path, log: Path) -> None:
    """Until a block is committed, and another has come to a checkpoint."""
    deadline = time.monotonic() + 300
    while not (list(run.glob("generations/part-*")) and list(run.glob("running-*"))):
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.02)


def alone() -> GenerateConfig:
    """The run of one process."""
    return GenerateConfig(
        run="one",
        offload=OffloadConfig(tier=Tier.nvme, resident_layers=0),
        dataset=DatasetConfig(kind=DatasetKind["sample"], limit=NUM_ROWS),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=BLOCK_ROWS, num_micro_batches=1),
        sampling=SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True),
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as home, running_cluster(Path(home, "slurm")) as cluster:
        folder = Path(home, "project")
        (folder / "outputs").mkdir(parents=True)
        log, run = folder / "ranks.log", folder / "outputs" / "generate" / "ranks"
        job = submit(cluster, folder)
        until_begun(run, log)
        before = len(list(run.glob("generations/part-*")))
        urgent = cluster.submit(folder, "--partition=urgent", "--nodes=2", "--mem=3500M", "--wrap=sleep 1")
        cluster.wait(urgent, "COMPLETED", seconds=120)
        cluster.wait(job, "COMPLETED", seconds=300)
        restarts, text = int(cluster.facts(job)["Restarts"]), log.read_text()
        assert restarts >= 1, "the urgent job takes its nodes"
        assert "2 ranks on 2 machines" in text
        assert "going on" in text
        assert "Traceback" not in text, text[-4000:]
        os.chdir(folder)
        generate(alone(), lambda: False)
        ranks, one = (read_generations(RunDirectory(path=folder / "outputs/generate" / n)) for n in ("ranks", "one"))
        assert ranks.num_rows == NUM_ROWS
        assert ranks.equals(one), "the ranks' rows are not those of one process"
    what = f"{NUM_ROWS} rows by 2 ranks in 2 nodes, each once and as one process makes them"
    print(f"{what}; taken the nodes behind {before} of {NUM_ROWS // BLOCK_ROWS} blocks, {restarts} restarts")


if __name__ == "__main__":
    main()
