"""A Slurm of two nodes on this machine, with its real daemons: for tests, where they are installed.

Debian: `apt-get install slurm-wlm munge`. Everything lies in one folder and listens on ports that were free.
"""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path

from jobs.config.slurm import script_text

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "squeue", "scontrol", "scancel")
NODES = ("n1", "n2")
POLL_SECONDS = 0.2


def written_script(name: str, folder: Path) -> str:
    """The path of a script, written to `folder` as `weightstream slurm` prints it."""
    path = folder / f"{name}.sbatch"
    path.write_text(script_text(name))
    return str(path)


def missing_programs() -> list[str]:
    paths = {name: shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") for name in (*DAEMONS, *COMMANDS)}
    return [name for name, path in paths.items() if path is None]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`environment` is for every command that speaks to it."""

    home: Path
    environment: dict[str, str]

    def ask(self, *command: str, folder: Path | None = None, **changes: str) -> str:
        environment = {**self.environment, **changes}
        ended = subprocess.run(
            command, env=environment, cwd=folder or self.home, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, f"{' '.join(command)}: {ended.stderr}"
        return ended.stdout.strip()

    def submit(self, folder: Path, *arguments: str, **changes: str) -> str:
        """The id of the job, submitted from `folder`."""
        return self.ask("sbatch", "--parsable", *arguments, folder=folder, **changes)

    def signal(self, task: str, name: str) -> None:
        """Sends a signal to the steps of a task. While the task changes its state scancel would send it again every
        few seconds, also to the task as it starts once more."""
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(["scancel", f"--signal={name}", task], env=self.environment, capture_output=True, timeout=2)

    def facts(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job, such as JobState, Restarts and ExitCode; of one task where it is `id_task`."""
        text = self.ask("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in text.splitlines()[-1].split() if "=" in word)

    def state(self, job: str) -> str:
        return self.facts(job)["JobState"]

    def hurry(self, job: str) -> None:
        """Slurm lets a job wait two minutes before it starts it again."""
        if self.state(job) == "PENDING":
            subprocess.run(
                ["scontrol", "update", f"JobId={job}", "StartTime=now"], env=self.environment, capture_output=True
            )

    def wait(self, job: str, *states: str, seconds: float) -> None:
        """Until it is in one of `states`; starts it again at once when it was requeued."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            is_over = time.monotonic() > deadline or state == "FAILED"
            assert not is_over, f"job {job} is {state} after {seconds:.0f} s, not {states}"
            self.hurry(job)
            time.sleep(POLL_SECONDS)


@contextmanager
def running_cluster(home: Path, *, num_cpus: int = 1) -> Iterator[Cluster]:
    """Up, with two idle nodes of `num_cpus` each; ends every daemon at the end."""
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "SLURM_CONF": f"{home}/slurm.conf"}
    for name in ("munge", "state", *NODES):
        (home / name).mkdir(parents=True, mode=0o755)
    (home / "slurm.conf").write_text(_configuration(home, num_cpus))
    key = home / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    munge = {"key-file": key, **{f"{name}-file": home / "munge" / name for name in ("pid", "log", "seed")}}
    with ExitStack() as daemons:
        socket_option = f"--socket={home}/munge/socket"
        start = [["munged", "--foreground", "--force", socket_option, *(f"--{n}={path}" for n, path in munge.items())]]
        start += [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
        for command in start:
            daemons.enter_context(_daemon(command, environment, home))
            if command[0] == "munged":
                _until((home / "munge" / "socket").exists, "munged is up")
        cluster = Cluster(home=home, environment=environment)
        _until(lambda: _idle_nodes(cluster) == len(NODES), "both nodes are idle")
        yield cluster
        subprocess.run(["scancel", "--user", getuser()], env=environment, capture_output=True)


@contextmanager
def _daemon(command: list[str], environment: dict[str, str], home: Path) -> Iterator[None]:
    with (home / f"{command[0]}.out").open("ab") as log:
        daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        daemon.terminate()
        try:
            daemon.wait(timeout=5)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _until(holds: object, what: str) -> None:
    assert callable(holds)
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, f"after 60 s it still does not hold that {what}"
        time.sleep(POLL_SECONDS)


def _idle_nodes(cluster: Cluster) -> int:
    answer = subprocess.run(["sinfo", "-hN", "-o", "%N %T"], env=cluster.environment, capture_output=True, text=True)
    return len({line for line in answer.stdout.splitlines() if line.endswith(" idle")})


def _configuration(home: Path, num_cpus: int) -> str:
    """No cgroups, no accounting, no services of the system. What starts in `urgent` takes the place of what runs in
    `usual`."""
    host, (controller, *ports) = socket.gethostname().partition(".")[0], _free_ports(1 + len(NODES))
    settings = {
        "ClusterName": "tests",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": getuser(),
        "SlurmdUser": getuser(),
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={home}/munge/socket",
        "SlurmctldPort": controller,
        "StateSaveLocation": home / "state",
        "SlurmdSpoolDir": f"{home}/%n",
        "SlurmctldPidFile": home / "slurmctld.pid",
        "SlurmdPidFile": f"{home}/%n.pid",
        "SlurmctldLogFile": home / "slurmctld.log",
        "SlurmdLogFile": f"{home}/%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=1,bf_interval=1,batch_sched_delay=0",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "SlurmdParameters": "config_overrides",
        "ReturnToService": 2,
        "KillWait": 30,
        "DefMemPerCPU": 256,
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    for node, port in zip(NODES, ports, strict=True):
        address = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
        lines.append(f"NodeName={node} {address} CPUs={num_cpus} RealMemory={4000 * num_cpus}")
    lines.append("PartitionName=usual Nodes=ALL Default=YES PriorityTier=1")
    lines.append("PartitionName=urgent Nodes=ALL PriorityTier=2")
    return "\n".join([*lines, ""])


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
