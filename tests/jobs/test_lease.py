"""A lease has one holder at a time, and whoever cannot hold it any longer loses it: by a fake clock and processes."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.files.locks import Holder, Lease, Leases, process_start_ticks, read_lease, this_process
from runtime.errors import DamagedRunError
from tests.jobs.kill_support import Kills
from tests.odd_files import ODD_FILES

SECONDS = 300.0
HERE = Holder(host="a", boot_id="boot", pid_namespace="ns", pid=10, start_ticks=1000)
OTHERS = {
    "on this host": replace(HERE, pid=11, start_ticks=2000),
    "in another container": replace(HERE, pid_namespace="other", pid=99),
    "on another host": replace(HERE, host="b", boot_id="its boot", pid=99),
}


class World:
    """What the processes of a test see: one clock, and which of them are there."""

    def __init__(self, folder: Path):
        self.folder, self.now = folder, 0.0
        self.ticks = {10: 1000, 11: 2000, 12: 3000}

    def leases(self, holder: Holder) -> Leases:
        clock = lambda: self.now  # noqa: E731
        return Leases(
            self.folder,
            SECONDS,
            holder=holder,
            clock=clock,
            start_ticks=lambda pid: self.ticks.get(pid),
            has_renewal_thread=False,
        )

    def read(self) -> Lease | None:
        return read_lease(self.folder / "it.json")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def names(world: World) -> list[str]:
    return sorted(path.name for path in world.folder.iterdir())


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_lease_has_one_holder_until_it_is_given_back(world: World, other: Holder) -> None:
    first, second = world.leases(HERE), world.leases(other)
    assert first.acquire("it")
    assert not second.acquire("it")
    first.release("it")
    assert names(world) == []
    assert second.acquire("it")
    assert not first.acquire("it")


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_lease_that_is_touched_is_kept_and_one_that_is_not_goes_when_its_seconds_are_over(
    world: World, other: Holder
) -> None:
    holder, waiting = world.leases(other), world.leases(HERE)
    assert holder.acquire("it")
    for beat in range(20):
        world.now += 0.9 * SECONDS
        os.utime(world.folder / "it.json", ns=(beat, beat))
        assert not waiting.acquire("it")
    world.now += 0.99 * SECONDS
    assert not waiting.acquire("it")
    world.now += 0.01 * SECONDS
    assert waiting.acquire("it")
    assert holder.renew() == ["it"]


def test_touching_changes_what_others_see(world: World) -> None:
    holder = world.leases(HERE)
    assert holder.acquire("it")
    os.utime(world.folder / "it.json", ns=(1, 1))
    before = world.read()
    assert holder.renew() == []
    assert before != world.read()


@pytest.mark.parametrize("ticks", [None, 4000], ids=["ended", "its pid is another's"])
def test_the_lease_of_a_process_that_has_ended_here_goes_at_once(world: World, ticks: int | None) -> None:
    assert world.leases(OTHERS["on this host"]).acquire("it")
    waiting = world.leases(HERE)
    assert not waiting.acquire("it")
    world.ticks = {10: 1000} | ({} if ticks is None else {11: ticks})
    assert waiting.acquire("it")


def test_the_lease_of_an_earlier_boot_goes_at_once(world: World) -> None:
    assert world.leases(replace(HERE, boot_id="before")).acquire("it")
    assert world.leases(HERE).acquire("it")


def test_a_holder_that_wakes_up_takes_nothing_from_its_successor(world: World) -> None:
    asleep, successor = world.leases(OTHERS["on another host"]), world.leases(HERE)
    assert asleep.acquire("it")
    assert not successor.acquire("it")
    world.now += SECONDS
    assert successor.acquire("it")
    held = world.read()
    assert asleep.renew() == ["it"]
    assert world.read() == held
    asleep.close()
    assert world.read() == held
    assert successor.renew() == []


def test_of_two_that_found_it_stale_the_slower_leaves_the_fasters_lease_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, slow = world.leases(OTHERS["on another host"]), world.leases(HERE)
    fast = world.leases(replace(HERE, pid=12, start_ticks=3000))
    assert gone.acquire("it")
    assert not slow.acquire("it")
    assert not fast.acquire("it")
    world.now += SECONDS
    rename = Path.rename

    def overtaken(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        assert fast.acquire("it")  # between the look of the slow one and its step
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    assert not slow.acquire("it")
    assert fast.renew() == []
    assert names(world) == ["it.json"]


def test_of_many_that_try_at_once_one_takes_over(world: World) -> None:
    assert world.leases(replace(HERE, boot_id="before")).acquire("it")
    taken, begin = list[Leases](), threading.Barrier(8)

    def attempt(pid: int) -> None:
        leases = world.leases(replace(HERE, pid=pid, start_ticks=pid))
        begin.wait()
        if leases.acquire("it"):
            taken.append(leases)

    world.ticks = {pid: pid for pid in range(100, 108)}
    threads = [threading.Thread(target=attempt, args=(pid,)) for pid in world.ticks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(world) == ["it.json"]
    found = world.read()
    assert found is not None
    assert found.holder["pid"] in world.ticks
    assert sum(leases.renew() == [] for leases in taken) <= 1


def test_killed_at_every_step_of_taking_over_the_lease_can_be_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = Kills(monkeypatch)
    (tmp_path / "leases").mkdir()
    world = World(tmp_path / "leases")
    assert world.leases(replace(HERE, boot_id="before")).acquire("it")
    with kills.copied(world.folder, tmp_path / "copies") as copies:
        mine = world.leases(HERE)
        assert mine.acquire("it")
        mine.release("it")
    assert len(copies) >= 4
    for copy in copies:
        later = World(copy)
        later.ticks = {12: 3000}  # whoever was killed is not there
        assert later.leases(replace(HERE, pid=12, start_ticks=3000)).acquire("it")


def test_a_damaged_lease_goes_by_its_heartbeat_alone(world: World) -> None:
    (world.folder / "it.json").write_text("{")
    waiting = world.leases(HERE)
    assert not waiting.acquire("it")
    world.now += SECONDS
    assert waiting.acquire("it")


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"pid":' + b"9" * 5000 + b"}", b"", b"\xff" * 100_000])
def test_an_odd_lease_goes_by_its_heartbeat_alone(world: World, data: bytes) -> None:
    (world.folder / "it.json").write_bytes(data)
    waiting = world.leases(HERE)
    assert not waiting.acquire("it")
    world.now += SECONDS
    assert waiting.acquire("it")


@pytest.mark.parametrize("kind", [*ODD_FILES, "a link to a lease"])
def test_what_is_no_lease_is_named_and_nobody_waits_for_it(world: World, kind: str) -> None:
    path = world.folder / "it.json"
    if kind in ODD_FILES:
        ODD_FILES[kind](path)
    else:
        assert world.leases(HERE).acquire("other")
        path.symlink_to("other.json")
    with pytest.raises(DamagedRunError, match=f"{path} is .*; expected a lease file: remove it, all workers wait"):
        world.leases(OTHERS["on another host"]).acquire("it")
    assert path.is_symlink() or path.exists(), "nothing that no worker made is removed"


@pytest.mark.parametrize("kind", ODD_FILES)
def test_a_lease_in_whose_place_something_else_lies_is_lost(world: World, kind: str) -> None:
    leases = world.leases(HERE)
    assert leases.acquire("it")
    (world.folder / "it.json").unlink()
    ODD_FILES[kind](world.folder / "it.json")
    assert leases.renew() == ["it"]


def test_this_process_is_there_and_one_that_ended_is_not() -> None:
    me = this_process()
    assert me.start_ticks == process_start_ticks(os.getpid())
    assert me.start_ticks is not None
    assert process_start_ticks(2**22 + 1) is None


def test_a_thread_touches_what_is_held(tmp_path: Path) -> None:
    touched = threading.Event()
    with Leases(tmp_path, 0.2) as leases:
        beat = leases.renew

        def seen() -> list[str]:
            touched.set()
            return beat()

        leases.renew = seen  # pyright: ignore[reportAttributeAccessIssue]
        assert leases.acquire("it")
        assert touched.wait(30)
    assert list(tmp_path.iterdir()) == []
