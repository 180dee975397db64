"""Workers as arrays of a real Slurm of two nodes, on one run: 4 tasks, then 2 more, then 6, while tasks are requeued,
signalled, cancelled and preempted, and the export behind them: python -m tests.slurm_elastic [copies=12] [home=DIR].

At the end every row is there once and all rows are those of one worker, and so is the exported file.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.slurm_cluster import Cluster, running_cluster, written_script

ROOT = Path(__file__).resolve().parents[1]
ARRAYS = (4, 2, 6)
PROMPTS = 40  # in the bundled data set
OF_A_TASK = ("--job-name=prompts", "--cpus-per-task=1", "--mem=1200M")


class Run:
    """A run of `copies` times the bundled prompts, whose blocks take some tenths of a second each."""

    def __init__(self, cluster: Cluster, folder: Path, copies: int):
        self.cluster, self.folder, self.num_rows = cluster, folder, copies * PROMPTS
        self.settings = [f"dataset.repeat={copies}", "policy=fixed", "policy.micro_batch_size=4"]
        self.settings += ["policy.num_micro_batches=1", "sampling.max_new_tokens=64", "sampling.ignore_eos=true"]
        self.settings += ["machine.num_threads=1", "checkpoint_seconds=1"]
        self.parts = folder / "outputs" / "generate" / "prompts" / "generations"
        (folder / "outputs").mkdir()

    def submit(self, *words: str, script: str = "generate") -> str:
        changes = {"WEIGHTSTREAM_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "WEIGHTSTREAM_WORKERS": "elastic"}
        options = [word for word in words if word.startswith("--")]
        settings = [word for word in words if word not in options]
        script = written_script(script, self.folder)
        return self.cluster.submit(self.folder, *OF_A_TASK, *options, script, *settings, **changes)

    def workers(self, count: int) -> list[str]:
        array = self.submit(f"--array=0-{count - 1}", "run=prompts", *self.settings)
        return [f"{array}_{index}" for index in range(count)]

    def num_parts(self) -> int:
        return len(list(self.parts.glob("part-*.parquet")))

    def wait_for_parts(self, count: int) -> None:
        deadline = time.monotonic() + 300
        while self.num_parts() < count:
            assert time.monotonic() < deadline, f"{self.num_parts()} of {count} parts after 300 s"
            time.sleep(0.1)

    def alone(self) -> list[dict[str, object]]:
        """The rows of one worker's run, exported."""
        for job, words in (("generate", ["run=alone", *self.settings]), ("export", self.export("alone"))):
            subprocess.run(
                [sys.executable, "-m", f"jobs.{job}", *words], cwd=self.folder, check=True, capture_output=True
            )
        return self.rows("alone")

    def logs(self) -> list[Path]:
        return sorted(self.folder.glob("outputs/*.log"))

    def export(self, name: str) -> list[str]:
        return [f"run=outputs/generate/{name}", f"out={name}.jsonl"]

    def rows(self, name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / f"{name}.jsonl").read_text().splitlines()]


def disturb(run: Run, tasks: Sequence[str]) -> str:
    """Requeues, signals and cancels one of them each; the next urgent job takes nodes. Returns what was done."""
    ask = run.cluster.ask
    ask("scontrol", "requeue", tasks[0])
    run.cluster.signal(tasks[1], "TERM")
    if len(tasks) < 4:
        return "1 requeued, 1 signalled"
    ask("scancel", tasks[2])
    run.cluster.signal(tasks[3], "KILL")
    return "1 requeued, 1 signalled, 1 cancelled, 1 killed"


def work(cluster: Cluster, run: Run) -> None:
    """Has the run done by three arrays, and says what was done to them. Raises AssertionError."""
    num_blocks, began, done = run.num_rows // 4, time.monotonic(), list[str]()
    tasks, all_tasks = list[str](), list[str]()
    for number, count in enumerate(ARRAYS):
        tasks = run.workers(count)
        all_tasks += tasks
        run.wait_for_parts(1 + number * num_blocks // 5)
        done.append(f"{count} tasks: {disturb(run, tasks)}")
    urgent = cluster.submit(run.folder, "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 1")
    last = tasks[0].partition("_")[0]
    exports = [
        run.submit(f"--dependency={how}", *run.export("prompts"), script="export")
        for how in (f"afterany:{last}", "singleton")
    ]
    cluster.wait(urgent, "COMPLETED", seconds=300)
    for job in (*all_tasks, *exports):
        cluster.wait(job, "COMPLETED", "CANCELLED", "FAILED", seconds=900)
    facts = [cluster.facts(task) for task in all_tasks]
    states, restarts = [fact["JobState"] for fact in facts], sum(int(fact["Restarts"]) for fact in facts)
    print(f"{'; '.join(done)}; 1 urgent job on both nodes")
    print(f"{restarts} restarts, {len(states)} tasks: {Counter(states)}, {time.monotonic() - began:.0f} s")
    assert [cluster.state(job) for job in exports] == ["COMPLETED", "COMPLETED"], [
        path.read_text() for path in run.logs()
    ]
    assert not [path for path in run.logs() if "Traceback" in path.read_text()]


def main(words: Sequence[str]) -> None:
    options = dict(word.split("=", 1) for word in words)
    with tempfile.TemporaryDirectory(dir=options.get("home")) as home:
        (Path(home) / "slurm").mkdir()
        with running_cluster(Path(home) / "slurm", num_cpus=3) as cluster:
            run = Run(cluster, Path(home), int(options.get("copies", "12")))
            work(cluster, run)
        shared, alone = run.rows("prompts"), run.alone()
    assert shared == alone, "the workers' rows are not those of one worker"
    assert len({row["id"] for row in shared}) == len(shared) == run.num_rows
    print(f"{len(shared)} rows, each once and as one worker makes them; exported behind the last task")


if __name__ == "__main__":
    main(sys.argv[1:])
