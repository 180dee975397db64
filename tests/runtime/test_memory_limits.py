"""Memory limits of control groups, on folders that look like /proc and /sys/fs/cgroup."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime.stream import host_memory
from runtime.stream.host_memory import bytes_within_limits, strictest_limit
from runtime.units import MIB

NO_LIMIT_V1 = 9223372036854771712  # what version 1 says where there is none


@dataclass(frozen=True)
class Machine:
    """A process in `group`, with the hierarchy's part below `root` mounted at `mount`."""

    home: Path
    is_v2: bool
    group: str
    root: str = "/"

    @property
    def mount(self) -> Path:
        return self.home / "sys fs" / "cgroup"

    @property
    def proc(self) -> Path:
        proc = self.home / "proc"
        proc.mkdir(exist_ok=True)
        line = f"0::{self.group}" if self.is_v2 else f"9:cpu,cpuacct:/other\n4:hugetlb,memory:{self.group}\n0::/"
        proc.joinpath("cgroup").write_text(f"{line}\n")
        kind = "cgroup2 cgroup2 rw,nsdelegate" if self.is_v2 else "cgroup cgroup rw,hugetlb,memory"
        at = str(self.mount).replace(" ", "\\040")
        proc.joinpath("mountinfo").write_text(
            f"20 1 0:5 / /proc rw - proc proc rw\n31 23 0:28 {self.root} {at} rw,relatime shared:9 - {kind}\n"
        )
        return proc

    def limit(self, folder: str, limit: int | str, used: int, reclaimable: int = 0, high: int | str = "max") -> None:
        group = self.mount / folder
        group.mkdir(parents=True, exist_ok=True)
        names = ("memory.max", "memory.current", "inactive_file")
        if not self.is_v2:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        (group / names[0]).write_text(f"{limit}\n")
        (group / names[1]).write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\n{names[2]} {reclaimable}\nactive_file 7\n")
        if self.is_v2:
            (group / "memory.high").write_text(f"{high}\n")


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("tightest", ["", "slurm", "slurm/job_7", "slurm/job_7/step_0"])
def test_the_strictest_limit_on_the_way_up_counts(tmp_path: Path, is_v2: bool, tightest: str) -> None:
    machine = Machine(tmp_path, is_v2, "/slurm/job_7/step_0")
    for folder in ("", "slurm", "slurm/job_7", "slurm/job_7/step_0"):
        machine.limit(folder, 300 * MIB if folder == tightest else 900 * MIB, 100 * MIB)
    machine.limit("slurm/job_8", MIB, 0)  # somebody else's
    assert bytes_within_limits(machine.proc) == 200 * MIB


@pytest.mark.parametrize("is_v2", [False, True])
def test_page_cache_that_nobody_uses_is_in_nobodys_way(tmp_path: Path, is_v2: bool) -> None:
    machine = Machine(tmp_path, is_v2, "/job")
    machine.limit("job", 300 * MIB, 280 * MIB, reclaimable=180 * MIB)
    assert bytes_within_limits(machine.proc) == 200 * MIB


def test_where_a_process_would_be_slowed_down_is_a_limit_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path, True, "/job")
    machine.limit("job", 900 * MIB, 100 * MIB, high=150 * MIB)
    assert bytes_within_limits(machine.proc) == 50 * MIB


def test_a_group_beyond_its_limit_has_nothing_left(tmp_path: Path) -> None:
    machine = Machine(tmp_path, True, "/job")
    machine.limit("job", 100 * MIB, 130 * MIB)
    assert bytes_within_limits(machine.proc) == 0


@pytest.mark.parametrize(("is_v2", "none"), [(True, "max"), (False, NO_LIMIT_V1)])
def test_without_a_limit_all_that_is_free_counts(
    tmp_path: Path, is_v2: bool, none: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, is_v2, "/")
    machine.limit("", none, 100 * MIB)
    within = bytes_within_limits(machine.proc)
    free = host_memory.available_bytes()
    monkeypatch.setattr(host_memory, "bytes_within_limits", lambda: within)
    assert host_memory.available_bytes() >= free - 512 * MIB


@pytest.mark.parametrize(("root", "group"), [("/docker/abc", "/docker/abc/job"), ("/docker/abc", "/"), ("/", "/../x")])
def test_a_container_sees_its_own_part_of_the_hierarchy(tmp_path: Path, root: str, group: str) -> None:
    machine = Machine(tmp_path, True, group, root)
    machine.limit("", 300 * MIB, 100 * MIB)
    assert bytes_within_limits(machine.proc) == 200 * MIB


def test_a_system_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert bytes_within_limits(tmp_path) is strictest_limit(tmp_path) is None


@pytest.mark.parametrize("is_v2", [True, False])
def test_a_container_is_as_large_as_its_strictest_limit_whatever_is_used_of_it(
    tmp_path: Path, is_v2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, is_v2, "/job/step")
    machine.limit("", "max" if is_v2 else NO_LIMIT_V1, 900 * MIB)
    machine.limit("job", 300 * MIB, 100 * MIB)
    machine.limit("job/step", 400 * MIB, 350 * MIB)
    assert strictest_limit(machine.proc) == 300 * MIB
    installed = host_memory.total_bytes()
    monkeypatch.setattr(host_memory, "strictest_limit", lambda: 300 * MIB)
    assert host_memory.total_bytes() == 300 * MIB
    monkeypatch.setattr(host_memory, "strictest_limit", lambda: NO_LIMIT_V1)
    assert host_memory.total_bytes() >= installed


def test_the_budget_of_a_run_follows_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "bytes_within_limits", lambda: 300 * MIB)
    assert host_memory.available_bytes() == 300 * MIB
