"""The processes that compute one run together: they exchange messages, and each sees when another has ended.

Messages are JSON over gloo, so that nothing that comes from elsewhere is more than data. All ranks come to each
exchange in the same order. Whatever they wait for, ranks see at any moment that another has ended or has been asked to
stop, on whichever machine it is: by a connection between each two, over which nothing goes but the number of a session
that is to stop.
"""

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ..closing import Closing
from ..config.settings import DevicesConfig, Gather, Parallelism
from ..errors import Interrupted, PeerEnded
from .launch import Launch

Exchange: TypeAlias = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
NUM_SESSIONS = 256  # a session is told by one byte
CONNECT_SECONDS = 60.0  # for a connection to a rank that listens
GREETING = struct.Struct("!16sI")  # a token that all ranks know, and the rank that connects
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))  # seconds, seconds, times


class Heartbeat(Closing):
    """The connections of a rank to all others. `ended` and `stop` may be called by any thread."""

    def __init__(self, connections: Mapping[int, socket.socket]):
        self._connections = connections
        self._ended, self._stopping = set[int](), set[int]()
        for each in connections.values():
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is gone closes nothing
            for name, value in KEEPALIVE:
                if hasattr(socket, name):
                    each.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @staticmethod
    def connect(rank: int, size: int, exchange: Exchange, host: str, *, is_local: bool) -> "Heartbeat":
        """Connects all ranks, each of which calls this. `host` is where rank 0 can be reached. Raises PeerEnded."""
        address = "127.0.0.1" if is_local else host if not rank else local_address(host)
        connections = dict[int, socket.socket]()
        try:
            if is_local:
                server = socket.create_server(("127.0.0.1", 0))
            elif socket.has_dualstack_ipv6():
                server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
            else:
                server = socket.create_server(("", 0))
            with server as listening:
                listening.settimeout(CONNECT_SECONDS)
                peers = exchange({"at": [address, listening.getsockname()[1]], "token": secrets.token_hex(16)})
                token = bytes.fromhex(peers[0]["token"])
                for other in range(rank):
                    connections[other] = socket.create_connection(tuple(peers[other]["at"]), CONNECT_SECONDS)
                    connections[other].sendall(GREETING.pack(token, rank))
                while len(connections) < size - 1:
                    connection, _ = listening.accept()
                    if (other := _read_greeting(connection, token)) is None:
                        connection.close()
                    else:
                        connections[other] = connection
        except OSError as error:
            missing = sorted({*range(size)} - {*connections, rank})
            raise PeerEnded(
                f"rank {rank} has no connection to rank {missing[0]}: {error}; ranks reach one another at any port",
                (),
            ) from error
        return Heartbeat(connections)

    def close(self) -> None:
        for each in self._connections.values():
            each.close()

    def ended_ranks(self) -> list[int]:
        """The ranks whose connections have ended, as they do with the process."""
        self._poll()
        return sorted(self._ended)

    def forget_old_stops(self, session: int) -> None:
        """What was said of sessions long ago holds no more."""
        self._stopping.discard((session + NUM_SESSIONS // 2) % NUM_SESSIONS)

    def is_stopping(self, session: int) -> bool:
        """Whether a rank has said that this session is to stop."""
        self._poll()
        return session % NUM_SESSIONS in self._stopping

    def stop(self, session: int) -> None:
        """Tells all others, as far as they are there."""
        self._stopping.add(session % NUM_SESSIONS)
        for rank, each in self._connections.items():
            try:
                each.send(bytes([session % NUM_SESSIONS]))
            except OSError:
                self._ended.add(rank)

    def _poll(self) -> None:
        for rank, each in self._connections.items():
            if rank in self._ended:
                continue
            try:
                data = each.recv(NUM_SESSIONS)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            self._stopping.update(data)
            if not data:
                self._ended.add(rank)


def local_address(host: str) -> str:
    """The address of this machine on the way to `host`, to which nothing is sent. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _read_greeting(connection: socket.socket, token: bytes) -> int | None:
    """The rank that has connected; None where somebody else has."""
    connection.settimeout(CONNECT_SECONDS)
    try:
        greeting, rank = GREETING.unpack(connection.recv(GREETING.size, socket.MSG_WAITALL))
    except (OSError, struct.error):
        return None
    return rank if secrets.compare_digest(greeting, token) else None


Message: TypeAlias = Mapping[str, Any]
JOIN_TIMEOUT = timedelta(minutes=10)  # for all to come: imports from a cold file system take long
GROUP_TIMEOUT = timedelta(days=30)  # for a pass, which may be long; who has ended is known at once
STOP_CHECK_SECONDS = 0.02  # between two looks for a stop
CHECK_TIMEOUT = timedelta(seconds=0.1)  # between two looks at the others, of one that waits for them
GRACE_SECONDS = 2.0  # for what one that has ended had said before, and from the end of one connection to the other's
SHARDED = DevicesConfig(way=Parallelism.sharded)
STOPPED = "start the same command again to go on"


class Ranks(Closing):
    """This process, `rank` of `size`, which compute as `devices` says. `machines`: on which machine each rank is.

    All ranks call all methods in one order, but for `ended`, `stop`, `is_stopping` and what requires something. Raises
    PeerEnded where they do not meet, and from any call where another one has ended."""

    def __init__(
        self,
        launch: Launch,
        should_stop: Callable[[], bool] = lambda: False,
        devices: DevicesConfig = SHARDED,
    ):
        """Waits for the others, until `should_stop` says yes."""
        self.rank, self.size, self.devices = launch.rank, launch.size, devices
        self._heartbeat: Heartbeat | None = None
        self._session = 0
        self.group = _join_group(launch, should_stop)
        # The same for processes that see one another's memory: on one machine, in one container, and where Slurm gives
        # nodes, whose memory it counts each by itself, in one node.
        boot, space = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), Path("/proc/self/ns/pid").stat()
        machine = f"{boot} {space.st_ino} {os.environ.get('SLURMD_NODENAME', '')}"
        self.machines = [str(each["machine"]) for each in self.exchange({"machine": machine})]
        self._heartbeat = Heartbeat.connect(
            self.rank, self.size, self.exchange, launch.host, is_local=self.is_on_one_machine
        )

    def close(self) -> None:
        """Leaves the others, who need not be there any more."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        dist.destroy_process_group()

    @property
    def is_on_one_machine(self) -> bool:
        return len({*self.machines}) == 1

    @property
    def num_local_ranks(self) -> int:
        """The ranks on this machine."""
        return self.machines.count(self.machines[self.rank])

    @property
    def local_rank(self) -> int:
        """Those of them of lower numbers."""
        return self.machines[: self.rank].count(self.machines[self.rank])

    @property
    def uses_shared_memory(self) -> bool:
        """Whether weights lie in memory that all ranks see."""
        gather = self.devices.gather
        if self.devices.way is Parallelism.tensor:
            return False
        return gather is Gather.memory or (gather is Gather.auto and self.is_on_one_machine)

    def new_group(self) -> dist.ProcessGroup:
        """A group of all ranks whose collectives have an order of their own."""
        group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup), "every rank is of the group"
        return group

    def exchange(self, message: Message) -> list[Message]:
        """The messages of all ranks, by rank; waits for each of them."""
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        sizes = self._all_gather(torch.tensor([len(data)]))
        longest = max(int(size) for size in sizes)
        messages = self._all_gather(torch.nn.functional.pad(data, (0, longest - len(data))))
        return [json.loads(each[: int(size)].numpy().tobytes()) for each, size in zip(messages, sizes, strict=True)]

    def broadcast(self, message: Message) -> None:
        """Tells all others, who call `heard`; of rank 0 alone."""
        self.exchange(message)

    def receive(self) -> Message:
        """What rank 0 tells."""
        return self.exchange({})[0]

    def ended_ranks(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [] if self._heartbeat is None else self._heartbeat.ended_ranks()

    def require_alive(self) -> None:
        """Raises PeerEnded where one has ended."""
        if ended := self.ended_ranks():
            raise self._peer_ended(ended)

    def begin_session(self) -> None:
        """Stops from now on are those of another session."""
        self._session += 1
        if self._heartbeat is not None:
            self._heartbeat.forget_old_stops(self._session)

    @property
    def is_stopping(self) -> bool:
        """Whether a rank was asked to stop in this session."""
        return self._heartbeat is not None and self._heartbeat.is_stopping(self._session)

    def stop(self) -> None:
        """Has all ranks stop, those that wait at once."""
        if self._heartbeat is not None:
            self._heartbeat.stop(self._session)

    def require_running(self) -> None:
        """Raises PeerEnded or Interrupted where what is waited for may never come."""
        self.require_alive()
        if self.is_stopping:
            raise Interrupted(STOPPED)

    def wait(self, is_done: Callable[[timedelta], bool]) -> None:
        """Returns once `is_done`, which waits so long at most, says so. Raises PeerEnded, and what that raises."""
        deadline = None
        while not is_done(CHECK_TIMEOUT):
            if deadline is None and self.ended_ranks():
                deadline = time.monotonic() + GRACE_SECONDS  # one that has said all there was to say may have ended
            if deadline is not None and time.monotonic() > deadline:
                raise self._peer_ended(self.ended_ranks())

    def run(self, begin: Callable[[], dist.Work | None]) -> None:
        """Begins a collective, and waits for its end."""
        try:
            work = begin()
            assert work is not None, "this rank is of the group"
            self.wait(partial(_wait_for_work, work))
        except RuntimeError as error:
            raise self.explain_failure(error) from error

    def _all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(part) for _ in range(self.size)]
        self.run(lambda: dist.all_gather(gathered, part, group=self.group, async_op=True))
        return gathered

    def explain_failure(self, error: RuntimeError) -> Interrupted:
        """What a failed exchange means: not all connections of a process end at once."""
        deadline = time.monotonic() + GRACE_SECONDS
        while not (ended := self.ended_ranks()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._peer_ended(ended) if ended else PeerEnded(f"the ranks have lost one another: {error}", ())

    def _peer_ended(self, ended: list[int]) -> PeerEnded:
        names, is_one = ", ".join(map(str, ended)), len(ended) == 1
        which = f"rank {names} of {self.size} has" if is_one else f"ranks {names} of {self.size} have"
        return PeerEnded(
            f"{which} ended, see {'its own message' if is_one else 'their own messages'}; the same command goes on, "
            "with as many ranks as you like",
            ended,
        )


def _wait_for_work(work: dist.Work, seconds: timedelta) -> bool:
    """Whether a collective has ended in that time. Raises RuntimeError where it has failed."""
    try:
        work.wait(seconds)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def _join_group(launch: Launch, should_stop: Callable[[], bool]) -> dist.ProcessGroup:
    """All ranks, for exchanges that may wait long. Waits for those that have not come yet on a thread of its own, as
    nothing can end that but time."""
    answers = SimpleQueue[dist.ProcessGroup | Exception]()
    Thread(target=_init_process_group, args=(launch, answers), name="ranks-meet", daemon=True).start()
    while answers.empty():
        if should_stop():
            raise Interrupted("stopped before all ranks had come: nothing was begun")
        time.sleep(STOP_CHECK_SECONDS)
    answer = answers.get()
    if isinstance(answer, dist.ProcessGroup):
        return answer
    reason = str(answer).partition("\n")[0]
    raise PeerEnded(f"rank {launch.rank} of {launch.size} peers no others at {launch.url}: {reason}", ()) from answer


def _init_process_group(launch: Launch, answers: "SimpleQueue[dist.ProcessGroup | Exception]") -> None:
    try:
        dist.init_process_group(
            "gloo", init_method=launch.url, rank=launch.rank, world_size=launch.size, timeout=JOIN_TIMEOUT
        )
        group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup), "every rank is of the group"
        answers.put(group)
    except (RuntimeError, ValueError) as error:
        answers.put(error)
