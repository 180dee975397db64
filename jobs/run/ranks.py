"""Runs over several ranks: rank 0 executes the run and writes files; the others compute their share."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runtime.config.settings import DevicesConfig, Parallelism
from runtime.devices.messages import end_sessions
from runtime.errors import ConfigError, Interrupted, PeerEnded, require
from runtime.ranks.launch import Launch
from runtime.ranks.ranks import Ranks

from ..config.settings import RunSettings
from ..record.stored_run import open_copy
from .requests import make_batch
from .run import open_model
from .tasks.task import Task

log = logging.getLogger(__name__)
LAUNCH_EXAMPLES = "torchrun --nproc-per-node 2 -m jobs.generate devices=sharded ..., or srun --ntasks 2 ..."
SEVERAL_PROCESSES = (
    "devices=one runs in one process, but torchrun has started several: set devices to sharded, tensor or pipeline, "
    "or start the job without torchrun"
)


@contextmanager
def join_ranks(devices: DevicesConfig, should_stop: Callable[[], bool]) -> Iterator[Ranks | None]:
    """Joins the ranks started by a launcher; None with `devices=one`. Raises ConfigError if settings and launcher
    disagree."""
    launch = Launch.from_environment(os.environ)
    if devices.way is Parallelism.one:
        has_other_ranks = launch is not None and launch.size > 1 and launch.url == "env://"
        require(not has_other_ranks, SEVERAL_PROCESSES)
        yield None
        return
    if launch is None or launch.size < 2:
        parallelism = devices.way.value
        raise ConfigError(f"devices={parallelism} needs several processes, but one was started: use {LAUNCH_EXAMPLES}")
    ranks = Ranks(launch, should_stop, devices)
    num_machines = len({*ranks.machines})
    log.info("%d ranks on %d machine%s", ranks.size, num_machines, "s" if num_machines > 1 else "")
    yield ranks  # no try/finally: after an error the other ranks notice the end of this process
    if not ranks.rank:
        end_sessions(ranks)
    ranks.close()


def follow_run(task: Task, config: RunSettings, should_stop: Callable[[], bool], ranks: Ranks) -> int:
    """Computes this rank's share of rank 0's run; returns the exit code. If the run is stopped, the lowest remaining
    rank raises Interrupted; others log it and return its exit code."""
    remote_manifest = open_copy(config, task.directory, should_stop).stored_manifest
    runtime, rows = open_model(task, config, should_stop, remote_manifest, ranks=ranks)
    batch = make_batch(runtime, rows.preview_rows(), task.requests)
    try:
        for _ in runtime.follow(batch.computed):
            pass
    except Interrupted as error:
        ended_ranks = error.ranks if isinstance(error, PeerEnded) else ()
        if {*range(ranks.rank)} <= {*ended_ranks}:  # all lower ranks have ended
            raise
        log.info("%s", error)
        return error.exit_code
    return 0
