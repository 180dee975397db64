"""Blocks in work, as the leases of a run say: whose they are, since when, and when they last gave a sign."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..files.locks import read_lease, told
from ..files.publishing import JsonValue, OddFileError


def lease_name(block: int) -> str:
    """The name of a block's lease."""
    return f"block-{block:06d}"


def _block_of(name: str) -> int | None:
    """The block whose lease has this file name; None of other files."""
    found = re.fullmatch(r"block-(\d{6,})\.json", name)
    return None if found is None else int(found[1])


@dataclass(frozen=True, kw_only=True)
class LeasedBlock:
    """A block in work. `holder`: the process, as its lease names it. `since_seconds` and `heartbeat_seconds`: how long
    ago it was leased, and renewed last, where clocks of the worker, the file system and this machine agree; only shown,
    nothing goes by them."""

    block: int
    holder: Mapping[str, JsonValue]
    since_seconds: float
    heartbeat_seconds: float

    @property
    def slurm(self) -> dict[str, str]:
        """The holder's ids in Slurm."""
        ids = self.holder.get("slurm")
        return {key: str(value) for key, value in ids.items()} if isinstance(ids, dict) else {}

    def __str__(self) -> str:
        return f"block {self.block}: {told(self.holder)}{told_slurm(self.slurm)}"


def told_slurm(ids: Mapping[str, str]) -> str:
    """Which job or task of Slurm that is, for people; nothing outside Slurm."""
    array, task = ids.get("SLURM_ARRAY_JOB_ID"), ids.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array is not None and task is not None else ids.get("SLURM_JOB_ID")
    restarts = ids.get("SLURM_RESTART_COUNT", "0")
    if job is None:
        return ""
    return f", Slurm job {job}" + (f" (restart {restarts})" if restarts != "0" else "")


def leased_blocks(folder: Path) -> list[LeasedBlock]:
    """Those in the folder of leases of a run that somebody works on. Raises OSError."""
    now, leases = time.time(), list[LeasedBlock]()
    for path in sorted(folder.glob("block-*.json")):
        try:
            block, lease = _block_of(path.name), read_lease(path)
        except OddFileError:  # nobody's
            continue
        if block is None or lease is None:  # given back in between
            continue
        since = lease.holder.get("since")
        leases.append(
            LeasedBlock(
                block=block,
                holder=lease.holder,
                since_seconds=max(0.0, now - since) if isinstance(since, float) else 0.0,
                heartbeat_seconds=max(0.0, now - lease.touched_ns / 1e9),
            )
        )
    return leases
