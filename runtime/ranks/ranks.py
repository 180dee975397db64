"""The processes that share the reads of one run: they exchange messages, and each sees when another has ended.

Messages are JSON over gloo, so that nothing that comes from elsewhere is more than data. All ranks come to each
exchange in the same order; one that ends lets the others know by that alone.
"""

import json
import os
import select
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ..closing import Closing
from ..errors import ConfigError, Interrupted, PeerEnded
from .launch import Launch

Message: TypeAlias = Mapping[str, Any]
MEETING = timedelta(minutes=10)  # for all to come: imports from a cold file system take long
WAITING = timedelta(days=30)  # for a pass, which may be long; who has ended is known at once
LOOK_SECONDS = 0.02  # between two looks for a stop
ENDING_SECONDS = 2.0  # from the end of a connection to that of its process


class Ranks(Closing):
    """This process, `rank` of `size`. All calls but `ended` and `require_all` are made by all ranks, in one order.

    Raises ConfigError where they are on several machines, PeerEnded where they do not meet, and from any call where
    another one has ended."""

    def __init__(self, launch: Launch, should_stop: Callable[[], bool] = lambda: False):
        """Waits for the others, until `should_stop` says yes."""
        self.rank, self.size = launch.rank, launch.size
        self._watched: dict[int, int] = {}  # ranks by the descriptors of their processes
        self._group = _meet(launch, should_stop)
        met = self.exchange({"pid": os.getpid(), "machine": _machine()})
        elsewhere = [rank for rank, each in enumerate(met) if each["machine"] != met[0]["machine"]]
        if elsewhere:
            raise ConfigError(
                f"devices.way=sharded: rank {elsewhere[0]} is on another machine than rank 0, and weights are shared "
                "within one as yet: start all ranks on one node (srun --nodes=1)"
            )
        for rank, each in enumerate(met):
            if rank != self.rank:
                self._watch(rank, each["pid"])

    def close(self) -> None:
        """Leaves the others, who need not be there any more."""
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()
        dist.destroy_process_group()

    def exchange(self, message: Message) -> list[Message]:
        """The messages of all ranks, by rank; waits for each of them."""
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        try:
            sizes = self._gathered(torch.tensor([len(data)]))
            most = max(int(size) for size in sizes)
            found = self._gathered(torch.nn.functional.pad(data, (0, most - len(data))))
        except RuntimeError as error:
            raise self._ending(error) from error
        return [json.loads(each[: int(size)].numpy().tobytes()) for each, size in zip(found, sizes, strict=True)]

    def tell(self, message: Message) -> None:
        """Tells all others, who call `heard`; of rank 0 alone."""
        self.exchange(message)

    def heard(self) -> Message:
        """What rank 0 tells."""
        return self.exchange({})[0]

    def ended(self) -> list[int]:
        """The ranks whose processes have ended."""
        return sorted(self._watched[descriptor] for descriptor in select.select([*self._watched], [], [], 0)[0])

    def require_all(self) -> None:
        """Raises PeerEnded where one has ended."""
        if ended := self.ended():
            raise self._told(ended)

    def _watch(self, rank: int, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError as error:
            raise ConfigError(
                f"devices.way=sharded: rank {self.rank} does not see process {pid} of rank {rank}: {error.strerror}; "
                "ranks that share memory must see one another, in one container"
            ) from error
        self._watched[descriptor] = rank

    def _gathered(self, part: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(found, part, group=self._group)
        return found

    def _ending(self, error: RuntimeError) -> Exception:
        """What a failed exchange means: a connection ends a little before its process does."""
        until = time.monotonic() + ENDING_SECONDS
        while not (ended := self.ended()) and time.monotonic() < until:
            time.sleep(0.01)
        return self._told(ended) if ended else PeerEnded(f"the ranks have lost one another: {error}", ())

    def _told(self, ended: list[int]) -> PeerEnded:
        which = f"rank {ended[0]}" if len(ended) == 1 else f"ranks {', '.join(map(str, ended))}"
        return PeerEnded(
            f"{which} of {self.size} has ended, see its own message; the same command goes on, with as many ranks as "
            "you like",
            ended,
        )


def _meet(launch: Launch, should_stop: Callable[[], bool]) -> dist.ProcessGroup:
    """All ranks, for exchanges that may wait long. Waits for those that have not come yet on a thread of its own, as
    nothing can end that but time."""
    answers = SimpleQueue[dist.ProcessGroup | Exception]()
    Thread(target=_join, args=(launch, answers), name="ranks-meet", daemon=True).start()
    while answers.empty():
        if should_stop():
            raise Interrupted("stopped before all ranks had come: nothing was begun")
        time.sleep(LOOK_SECONDS)
    answer = answers.get()
    if isinstance(answer, dist.ProcessGroup):
        return answer
    reason = str(answer).partition("\n")[0]
    raise PeerEnded(f"rank {launch.rank} of {launch.size} met no others at {launch.url}: {reason}", ()) from answer


def _join(launch: Launch, answers: "SimpleQueue[dist.ProcessGroup | Exception]") -> None:
    try:
        dist.init_process_group(
            "gloo", init_method=launch.url, rank=launch.rank, world_size=launch.size, timeout=MEETING
        )
        group = dist.new_group(backend="gloo", timeout=WAITING)
        assert isinstance(group, dist.ProcessGroup), "every rank is of the group"
        answers.put(group)
    except (RuntimeError, ValueError) as error:
        answers.put(error)


def _machine() -> str:
    """The same for processes on one machine alone."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
