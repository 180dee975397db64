"""Reads rank, world size and rendezvous URL from the environment variables of `torchrun` or `srun`."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ..errors import ConfigError

FIRST_PORT, NUM_PORTS = 20_000, 20_000  # range of default ports for Slurm steps


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Rank, world size, and URL for `init_process_group`. Under torchrun the URL is `env://`."""

    rank: int
    size: int
    url: str

    @property
    def host(self) -> str:
        """Host name or address of rank 0."""
        if self.url == "env://":
            return os.environ.get("MASTER_ADDR", "localhost")
        return urlsplit(self.url).hostname or "localhost"

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> "Launch | None":
        """Reads the variables of `torchrun` or `srun`. Returns None without a launcher. Raises ConfigError."""
        try:
            if "RANK" in environment and "WORLD_SIZE" in environment:
                return Launch(rank=int(environment["RANK"]), size=int(environment["WORLD_SIZE"]), url="env://")
            if "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
                # Rendezvous on the step's first node, at a port that another step is unlikely to use.
                job, step = int(environment.get("SLURM_JOB_ID", 0)), int(environment.get("SLURM_STEP_ID", 0))
                nodes = environment.get("SLURM_STEP_NODELIST", "localhost")
                host = environment.get("MASTER_ADDR") or first_host(nodes)
                port = int(environment.get("MASTER_PORT") or FIRST_PORT + (job * 61 + step) % NUM_PORTS)
                rank, size = int(environment["SLURM_PROCID"]), int(environment["SLURM_STEP_NUM_TASKS"])
                return Launch(rank=rank, size=size, url=f"tcp://{host}:{port}")
        except ValueError as error:
            raise ConfigError(f"RANK, WORLD_SIZE, MASTER_PORT or Slurm variable: not an integer: {error}") from error
        return None


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu03` for `gpu[03-07,11],login`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?([^,\[]*)", nodes)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST names no host: {nodes!r}")
    stem, numbers, rest = match.groups()
    return stem + (re.split("[-,]", numbers)[0] + rest if numbers else "")
