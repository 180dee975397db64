"""A measurement in a process of its own, so that none finds what another has left behind."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from runtime.errors import MillraceError
from runtime.store.cache_root import cache_root

from ..process import settled
from .config import PEERS, BenchConfig, Contender
from .gguf_export import export_gguf
from .guests import GUESTS, python_of
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
    """Raises MillraceError where the process fails, with the last that it said. What Millrace says goes to stderr."""
    environment, python, module = dict(os.environ), sys.executable, "jobs.io.bench.measure"
    guest = GUESTS.get(task.contender)
    if guest is not None:
        python, module = str(python_of(guest)), guest.module
        if guest.gguf_kind is not None:
            task = replace(task, path=str(_exported(Path(task.path), guest.gguf_kind)))
    elif Contender(task.contender) not in PEERS:
        environment = settled(environment)
    worker = [python, "-m", module, json.dumps(asdict(task))]
    stderr = subprocess.PIPE if Contender(task.contender) in PEERS else None
    done = subprocess.run(worker, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False, env=environment)
    if done.returncode:
        said = (done.stderr or "").strip().splitlines() or ["see above"]
        raise MillraceError(f"contender {task.contender} ended with exit code {done.returncode}: {said[-1]}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def _exported(checkpoint: Path, kind: str) -> Path:
    """Written once, for as long as the checkpoint's files stay as they are."""
    files = sorted(file for file in checkpoint.iterdir() if file.is_file())
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr(state).encode()).hexdigest()[:12]
    target = cache_root() / "peers" / f"{checkpoint.name}-{digest}-{kind}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        export_gguf(checkpoint, target, kind)
    return target
