"""Elastic workers: processes that join and leave a run at any time and share its blocks by leases. The first worker
writes the plan, and one finishes the run once all blocks are committed. A worker without a free block waits, and takes
over the blocks of workers that end."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from runtime.batching.balance import Block
from runtime.closing import Closing
from runtime.errors import Interrupted

from ..files.locks import Leases
from ..files.publishing import make_directory
from ..record.part_files import visible_files
from ..record.run_dir import RunDirectory
from ..record.unfinished import lease_name

MAX_POLL_SECONDS = 2.0
PLAN, SUMMARY = "plan", "closing"  # names of leases


class Worker(Closing):
    """This process as a worker of a run. Closing releases its leases."""

    def __init__(self, directory: RunDirectory, lease_seconds: float, should_stop: Callable[[], bool]):
        self._directory, self._should_stop = directory, should_stop
        self._poll_seconds = min(MAX_POLL_SECONDS, lease_seconds / 4)
        self._leases = Leases(make_directory(directory.leases), lease_seconds)

    def close(self) -> None:
        self._leases.close()

    def acquire_plan(self, plan: Path) -> bool:
        """Takes the lease for writing the plan, until `release_plan`. Waits; returns False if another worker has
        written the plan. Raises Interrupted, OutputError."""
        return self._acquire_unless_done(PLAN, plan.exists)

    def release_plan(self) -> None:
        self._leases.release(PLAN)

    def acquire_summary(self) -> bool:
        """Takes the lease for writing the summary, which finishes the run. Waits; returns False if another worker has
        finished it. Raises Interrupted, OutputError."""
        return self._acquire_unless_done(SUMMARY, self._directory.success.exists)

    def lease_blocks(self, left: Sequence[Block]) -> Iterator[tuple[Block, set[int]]]:
        """Yields blocks of `left`, each leased until the next is requested, with the indices of committed blocks. Ends
        once all are committed. Raises Interrupted, OutputError."""
        while True:
            names = {path.name for path in visible_files(self._directory.generations)}
            done = {int(name.split("-")[1].split(".")[0]) for name in names if name.startswith("part-")}
            left = [block for block in left if block.index not in done]
            if not left:
                return
            block = next((block for block in left if self._leases.acquire(lease_name(block.index))), None)
            if block is None:
                self._wait()
                continue
            # Race: another worker may have committed it after the listing and before the lease.
            if not self._directory.generations_part(block.index).exists():
                yield block, done
            self._leases.release(lease_name(block.index))

    def _acquire_unless_done(self, name: str, is_done: Callable[[], bool]) -> bool:
        while not is_done():
            if not self._leases.acquire(name):
                self._wait()
            elif not is_done():  # check again: it may have been done before the lease was free
                return True
            else:
                self._leases.release(name)
        return False

    def _wait(self) -> None:
        if self._should_stop():
            raise Interrupted("stopped while waiting for other workers; start the same command again to resume")
        time.sleep(self._poll_seconds)
