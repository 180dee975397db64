"""A measurement in a process of its own, so that none finds what another has left behind."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from runtime.errors import MillraceError
from runtime.plan.placement.defaults import MICRO_BATCH_SIZE
from runtime.store.cache_root import cache_root

from ..config.process import settled
from .config import BenchConfig
from .contenders import CONTENDERS, Contender, Guest, Ours, Peer
from .gguf_export import export_gguf
from .guests import python_of
from .task import REFUSED, Result, Task

ERROR = re.compile(r"(\[\w+\]: )?[\w.]*(Error|Exception)\b")  # the line of a traceback that says what


@dataclass(frozen=True, kw_only=True)
class Ended:
    exit_code: int
    stdout: str
    stderr: str


def task_of(config: BenchConfig, contender: Contender, path: str, num_prompts: int) -> Task:
    entry = CONTENDERS[contender]
    batch_size = config.batch_sizes.get(contender, config.batch_size)
    return Task(
        contender=contender.value,
        path=path,
        num_prompts=num_prompts,
        prompt_tokens=config.prompt_tokens,
        num_new_tokens=config.num_new_tokens,
        ignore_eos=config.ignore_eos,
        batch_size=batch_size if isinstance(entry, Peer) and entry.batch_sizes else None,
        micro_batch_size=config.micro_batch_size,
        num_micro_batches=config.num_micro_batches or -(-num_prompts // (config.micro_batch_size or MICRO_BATCH_SIZE)),
        weight_share=config.weight_share,
        num_threads=config.num_threads,
        schedule=(entry.schedule if isinstance(entry, Ours) else Ours.schedule).value,
        limit_minutes=config.peer_minutes if isinstance(entry, Peer) else None,
    )


def measured(task: Task) -> Result:
    """Raises MillraceError where the process fails, with the error it ended with, or takes longer than its limit. What
    Millrace says goes to stderr."""
    peer = task.entry if isinstance(task.entry, Peer) else None
    environment = settled(os.environ) if peer is None else dict(os.environ)
    python, module = sys.executable, "jobs.benchmarks.measure"
    if peer is not None and peer.guest is not None:
        home = python_of(peer.guest)
        python, module = str(home), peer.guest.module
        environment |= _libraries(task, peer.guest, home.parent.parent / "lib")
        task = _prepared(task, peer.guest)
    worker = [python, "-m", module, json.dumps(asdict(task))]
    ended = _run(worker, environment, keeps_stderr=peer is not None or task.is_check, task=task)
    if ended.exit_code:
        raise MillraceError(f"contender {task.contender} {_why(ended)}")
    return Result(**json.loads(ended.stdout.splitlines()[-1]))


def _libraries(task: Task, guest: Guest, folder: Path) -> dict[str, str]:
    """What libraries take from the environment alone: how many threads, and what is loaded before them."""
    preloaded = {"LD_PRELOAD": ":".join(str(folder / name) for name in guest.preloaded)} if guest.preloaded else {}
    return {"OMP_NUM_THREADS": str(task.num_threads), "TOKENIZERS_PARALLELISM": "false", **preloaded}


def _run(command: Sequence[str], environment: dict[str, str], *, keeps_stderr: bool, task: Task) -> Ended:
    """With all processes that it starts, which end with it. Raises MillraceError past the task's limit."""
    stderr = subprocess.PIPE if keeps_stderr else None
    seconds = None if task.limit_minutes is None else 60 * task.limit_minutes
    with (
        _sigterm_unwinds(),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            said, complaints = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise MillraceError(
                f"contender {task.contender} took longer than peer_minutes={task.limit_minutes:g}"
            ) from None
        finally:
            _end_all(process.pid)
    return Ended(exit_code=process.returncode, stdout=said, stderr=complaints or "")


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """The worker has a session of its own, which a signal to ours does not reach: it must be ended on the way out."""

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_all(session: int) -> None:
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        return  # all have ended by themselves


def _why(ended: Ended) -> str:
    if ended.exit_code < 0:
        return f"was ended by {signal.Signals(-ended.exit_code).name}"
    lines = ended.stderr.strip().splitlines() or ["see above"]
    if refused := [place for place, line in enumerate(lines) if line.startswith(REFUSED)]:
        return f"cannot run: {'; '.join(map(str.strip, lines[refused[-1] :])).removeprefix(REFUSED)}"
    said = next((line for line in reversed(lines) if ERROR.match(line)), lines[-1])
    return f"ended with exit code {ended.exit_code}: {said}"


def _prepared(task: Task, guest: Guest) -> Task:
    """With the files that it reads, written once, for as long as the checkpoint's stay as they are."""
    if guest.gguf_kind is None:
        return task
    checkpoint = Path(task.path)
    files = sorted(file for file in checkpoint.iterdir() if file.is_file())
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr(state).encode()).hexdigest()[:12]
    target = cache_root() / "peers" / f"{checkpoint.name}-{digest}-{guest.gguf_kind}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        export_gguf(checkpoint, target, guest.gguf_kind)
    return replace(task, path=str(target))
