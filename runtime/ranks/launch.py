"""What a launcher tells each process that it starts: which one it is, and where they meet."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ..errors import ConfigError

FIRST_PORT, NUM_PORTS = 20_000, 20_000  # of which a Slurm step takes one by its number


@dataclass(frozen=True, kw_only=True)
class Launch:
    """`rank` of `size` processes, which meet at `url`; `env://` is for torchrun, whose agent waits there."""

    rank: int
    size: int
    url: str

    @property
    def host(self) -> str:
        """Where rank 0 can be reached."""
        if self.url == "env://":
            return os.environ.get("MASTER_ADDR", "localhost")
        return urlsplit(self.url).hostname or "localhost"

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> "Launch | None":
        """What `torchrun` or `srun` has said; None where one process was started by itself. Raises ConfigError."""
        try:
            if "RANK" in environment and "WORLD_SIZE" in environment:
                return Launch(rank=int(environment["RANK"]), size=int(environment["WORLD_SIZE"]), url="env://")
            if "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
                # The tasks of a step meet on its first node, at a port that no other step of this cluster is likely to
                # have.
                job, step = int(environment.get("SLURM_JOB_ID", 0)), int(environment.get("SLURM_STEP_ID", 0))
                nodes = environment.get("SLURM_STEP_NODELIST", "localhost")
                host = environment.get("MASTER_ADDR") or first_host(nodes)
                port = int(environment.get("MASTER_PORT") or FIRST_PORT + (job * 61 + step) % NUM_PORTS)
                rank, size = int(environment["SLURM_PROCID"]), int(environment["SLURM_STEP_NUM_TASKS"])
                return Launch(rank=rank, size=size, url=f"tcp://{host}:{port}")
        except ValueError as error:
            raise ConfigError(f"RANK, WORLD_SIZE or Slurm's variables hold no number: {error}") from error
        return None


def first_host(nodes: str) -> str:
    """The first of a list of hosts as Slurm writes them: `gpu[03-07,11],login` begins with gpu03."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?([^,\[]*)", nodes)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST names no host: {nodes!r}")
    stem, numbers, rest = match.groups()
    return stem + (re.split("[-,]", numbers)[0] + rest if numbers else "")
