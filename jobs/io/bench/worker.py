"""A measurement in a process of its own, so that none finds what another has left behind."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

from runtime.errors import MillraceError

from ..process import settled
from .config import PEERS, BenchConfig, Contender
from .task import Result, Task


def task_of(config: BenchConfig, contender: Contender, path: str, num_prompts: int) -> Task:
    return Task(
        contender=contender.value,
        path=path,
        num_prompts=num_prompts,
        prompt_tokens=config.prompt_tokens,
        num_new_tokens=config.num_new_tokens,
        ignore_eos=config.ignore_eos,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        num_micro_batches=config.num_micro_batches or -(-num_prompts // config.micro_batch_size),
        weight_share=config.weight_share,
        num_threads=config.num_threads,
    )


def measured(task: Task) -> Result:
    """Raises MillraceError where the process fails; what it says goes to stderr."""
    environment = dict(os.environ)
    if Contender(task.contender) not in PEERS:
        environment = settled(environment)
    worker = [sys.executable, "-m", "jobs.io.bench.measure", json.dumps(asdict(task))]
    done = subprocess.run(worker, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        raise MillraceError(f"contender {task.contender} ended with exit code {done.returncode}; see above")
    return Result(**json.loads(done.stdout.splitlines()[-1]))
