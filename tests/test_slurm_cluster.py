"""The scripts of `weightstream slurm` and the sweep of docs/how-to/slurm.md on real Slurm daemons."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.docs.pages import blocks_of
from tests.slurm_cluster import Cluster, missing_programs, running_cluster, written_script

ROOT = Path(__file__).resolve().parents[1]
NUM_ROWS = 80
TASK = ("--cpus-per-task=1", "--mem=1500M")
# Ten blocks a shard, of some tenths of a second each: a task can be stopped between them, and in them.
SETTINGS = ("run=night", "dataset.repeat=2", "policy=fixed", "policy.micro_batch_size=4", "policy.num_micro_batches=1")
SETTINGS += ("sampling.max_new_tokens=64", "sampling.ignore_eos=true", "machine.num_threads=1")

pytestmark = pytest.mark.skipif(
    bool(missing_programs()),
    reason=f"Slurm is not installed ({', '.join(missing_programs())}): apt-get install slurm-wlm munge",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Path:
    """Where a user submits from."""
    (tmp_path / "outputs").mkdir()
    return tmp_path


def submit_array(cluster: Cluster, folder: Path, *options: str, **changes: str) -> str:
    changes = {"WEIGHTSTREAM_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **changes}
    return cluster.submit(folder, *TASK, *options, written_script("generate", folder), *SETTINGS, **changes)


def shard(folder: Path, index: int) -> Path:
    return folder / "outputs" / "generate" / f"night-{index:05d}-of-00002"


def wait_for_part(run: Path) -> None:
    deadline = time.monotonic() + 180
    while not list((run / "generations").glob("part-*.parquet")):
        assert time.monotonic() < deadline, [path.read_text()[-800:] for path in run.parents[1].glob("*.log")]
        time.sleep(0.05)


def ids(folder: Path) -> Counter[str]:
    parts = sorted(folder.glob("outputs/generate/night*/generations/part-*.parquet"))
    return Counter(str(row) for part in parts for row in pq.read_table(part, columns=["id"])["id"].to_pylist())


def test_an_array_survives_preemption_and_cancelling_and_ends_with_every_row_once(
    cluster: Cluster, folder: Path
) -> None:
    array = submit_array(cluster, folder, "--array=0-1")
    for index in (0, 1):
        wait_for_part(shard(folder, index))
    cluster.signal(f"{array}_0", "STOP")  # or it might end before it is preempted, which lets it go on
    cluster.ask("scancel", f"{array}_1")
    urgent = cluster.submit(folder, "--partition=urgent", "--nodes=2", "--mem=3500M", "--wrap=sleep 1")
    cluster.wait(f"{array}_1", "CANCELLED", seconds=60)
    assert not (shard(folder, 1) / "_SUCCESS.json").exists()
    cluster.wait(urgent, "COMPLETED", seconds=120)

    again = submit_array(cluster, folder, "--array=1", WEIGHTSTREAM_SHARDS="2")
    counting = "--wrap=ls outputs/generate/night-*/_SUCCESS.json | wc -l > counted"
    after = cluster.submit(folder, f"--dependency=afterok:{array}_0:{again}_1", "--mem=100M", counting)
    for task in (f"{array}_0", f"{again}_1", after):
        cluster.wait(task, "COMPLETED", seconds=240)

    assert int(cluster.facts(f"{array}_0")["Restarts"]) >= 1, "the urgent job takes its node"
    assert (folder / "counted").read_text().strip() == "2", "what depends on the array starts behind its last shard"
    counts = ids(folder)
    assert (len(counts), set(counts.values())) == (NUM_ROWS, {1})
    for index, job in ((0, array), (1, again)):
        log = (folder / f"slurm-{job}_{index}.log").read_text()
        assert "resuming: " in log
        assert "Traceback" not in log


def test_workers_that_are_requeued_and_signalled_and_the_export_behind_them_are_as_the_page_says(
    cluster: Cluster, folder: Path
) -> None:
    prompts = [{"prompt": f"Q: Sort these numbers: {i} 7 3 A:"} for i in range(40)]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in prompts))
    write_generate, write_export, workers, export = page_commands()
    for write in (write_generate, write_export):
        submit_as_written(cluster, folder, write)
    array = submit_as_written(cluster, folder, workers)
    wait_for_part(folder / "outputs" / "generate" / "prompts")
    cluster.ask("scontrol", "requeue", f"{array}_0")
    cluster.signal(f"{array}_1", "TERM")
    exporting = submit_as_written(cluster, folder, export)
    for index in range(2):
        cluster.wait(f"{array}_{index}", "COMPLETED", seconds=180)
    assert [int(cluster.facts(f"{array}_{index}")["Restarts"]) for index in (0, 1)] == [1, 1]
    cluster.wait(exporting, "COMPLETED", seconds=60)
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [(row["id"], row["status"]) for row in rows] == [(str(i), "ok") for i in range(len(prompts))]


def page_commands() -> list[str]:
    """The commands of the page that write the scripts, submit workers, and export their run."""
    page = ROOT / "docs" / "how-to" / "slurm.md"
    text = "".join(block.text for block in blocks_of(page) if "slurm export" in block.text or "singleton" in block.text)
    commands = text.replace("\\\n", "").splitlines()
    assert [command.split()[1] for command in commands] == ["slurm", "slurm", "sbatch", "--job-name=prompts"]
    return commands


def submit_as_written(cluster: Cluster, folder: Path, command: str) -> str:
    """What a command of the page prints, such as the id of the job: two small tasks with a model that comes along."""
    changes = {
        "weightstream ": f"{sys.executable} -m jobs ",
        "generate.sbatch": f"{' '.join(TASK)} generate.sbatch" if "> generate" not in command else "generate.sbatch",
        " export.sbatch run": f" {' '.join(TASK)} export.sbatch run",
        "sbatch ": "sbatch --parsable ",
        "model=mixtral": "model=tiny",
        "--array=0-3": "--array=0-1",
    }
    for old, new in changes.items():
        command = command.replace(old, new, 1)
    if "generate.sbatch model" in command:
        command = " ".join([command, *SETTINGS[2:]])
    return cluster.ask("bash", "-c", command, folder=folder, PYTHONPATH=str(ROOT))


def test_a_task_at_its_time_limit_is_warned_and_requeues_itself(cluster: Cluster, folder: Path) -> None:
    """The warning comes 50 s before the limit of a minute, or earlier, even before Python runs: Slurm looks seldom."""
    paced = folder / "paced"
    paced.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.paced_job "$@"\n')
    paced.chmod(0o755)
    changes = {"WEIGHTSTREAM_PYTHON": str(paced)}
    array = submit_array(cluster, folder, "--array=0-0", "--time=1", "--signal=USR1@50", **changes)
    task = f"{array}_0"
    deadline = time.monotonic() + 240
    while int(cluster.facts(task)["Restarts"]) < 1:
        assert time.monotonic() < deadline, cluster.facts(task)
        time.sleep(0.5)
    cluster.ask("scancel", task)
    cluster.wait(task, "CANCELLED", seconds=60)
    log = (folder / f"slurm-{array}_0.log").read_text()
    assert "interrupted: " in log or "User defined signal 1" in log
    assert "Traceback" not in log


def test_a_sweep_of_settings_is_one_array(cluster: Cluster, folder: Path) -> None:
    launcher = ("partition=usual", "mem_gb=2", "cpus_per_task=1", "timeout_min=10")
    ended = subprocess.run(
        [sys.executable, "-m", "jobs.generate", "--multirun", "hydra/launcher=slurm"]
        + [f"hydra.launcher.{setting}" for setting in launcher]
        + ["offload=none,nvme", "policy.schedule=flexgen", "run='${offload.tier}-${policy.schedule}'"]
        + ["dataset.limit=3", "sampling.max_new_tokens=2", f"output_root={folder}"],
        env={**cluster.environment, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    finished = {path.parent.name for path in folder.glob("generate/*/_SUCCESS.json")}
    assert finished == {"none-flexgen", "nvme-flexgen"}
    settings = json.loads((folder / "generate/nvme-flexgen/run.json").read_text())["operational"]
    assert settings["policy.schedule"] == "flexgen"
    jobs = {path.name.rpartition("_")[0] for path in folder.glob("sweep/.submitit/*_*") if path.is_dir()}
    assert len(jobs) == 1, "two tasks of one array"
