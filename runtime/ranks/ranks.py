"""The process group of a run: exchange of messages, and detection of ranks that ended or were asked to stop.

Messages are JSON over gloo, never pickle, so that other ranks cannot execute code here. All ranks make the same
exchanges in the same order. Each pair of ranks also has a TCP connection, the heartbeat. The only data sent over it are
the numbers of sessions to stop. A closed connection means that the rank has ended.
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
NUM_SESSIONS = 256  # a session's number is sent as one byte, modulo this
CONNECT_SECONDS = 60.0  # timeout of each heartbeat connection
GREETING = struct.Struct("!16sI")  # shared token, rank that connects
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))  # seconds, seconds, probes


class Heartbeat(Closing):
    """The heartbeat connections of this rank to all others. Any thread may call `ended_ranks`, `is_stopping` and
    `stop`."""

    def __init__(self, connections: Mapping[int, socket.socket]):
        self._connections = connections
        self._ended, self._stopping = set[int](), set[int]()
        for connection in connections.values():
            connection.setblocking(False)
            # A machine that loses power does not close its connections: TCP keepalive detects that.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE:
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @staticmethod
    def connect(rank: int, size: int, exchange: Exchange, host: str, *, is_local: bool) -> "Heartbeat":
        """Connects all ranks, which must call this together. A rank connects to all lower ranks, and accepts
        connections of all higher ones. `host`: rank 0's host. Raises PeerEnded."""
        address = "127.0.0.1"
        if not is_local:
            address = local_address(host) if rank else host
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
                peers = exchange({"address": [address, listening.getsockname()[1]], "token": secrets.token_hex(16)})
                token = bytes.fromhex(peers[0]["token"])
                for other in range(rank):
                    connections[other] = socket.create_connection(tuple(peers[other]["address"]), CONNECT_SECONDS)
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
                f"rank {rank} cannot connect to rank {missing[0]}: {error}; allow TCP between the ranks on all ports",
                (),
            ) from error
        return Heartbeat(connections)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def ended_ranks(self) -> list[int]:
        """Ranks with a closed connection: their processes have ended."""
        self._poll()
        return sorted(self._ended)

    def forget_old_stops(self, session: int) -> None:
        """Clears the stop of the session half a cycle of numbers ago, long before its number is used again."""
        self._stopping.discard((session + NUM_SESSIONS // 2) % NUM_SESSIONS)

    def is_stopping(self, session: int) -> bool:
        """True if any rank has asked to stop this session."""
        self._poll()
        return session % NUM_SESSIONS in self._stopping

    def stop(self, session: int) -> None:
        """Asks all live ranks to stop this session."""
        self._stopping.add(session % NUM_SESSIONS)
        for rank, connection in self._connections.items():
            try:
                connection.send(bytes([session % NUM_SESSIONS]))
            except OSError:
                self._ended.add(rank)

    def _poll(self) -> None:
        """Reads what has arrived, without waiting."""
        for rank, connection in self._connections.items():
            if rank in self._ended:
                continue
            try:
                data = connection.recv(NUM_SESSIONS)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            self._stopping.update(data)  # each byte is a session number
            if not data:
                self._ended.add(rank)


def local_address(host: str) -> str:
    """This machine's address on the route to `host`; sends no packet. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # UDP: only selects a route
        return probe.getsockname()[0]


def _read_greeting(connection: socket.socket, token: bytes) -> int | None:
    """The rank that has connected; None if the token is wrong."""
    connection.settimeout(CONNECT_SECONDS)
    try:
        greeting, rank = GREETING.unpack(connection.recv(GREETING.size, socket.MSG_WAITALL))
    except (OSError, struct.error):
        return None
    return rank if secrets.compare_digest(greeting, token) else None


Message: TypeAlias = Mapping[str, Any]
JOIN_TIMEOUT = timedelta(minutes=10)  # imports from a cold file system take long
GROUP_TIMEOUT = timedelta(days=30)  # never reached: the heartbeat reports ended ranks
POLL_SECONDS = 1e-4  # between polls whether a page of weights has arrived
POLLS_PER_CHECK = 20  # polls between checks of the heartbeat
STOP_CHECK_SECONDS = 0.02  # between checks for a stop
CHECK_TIMEOUT = timedelta(seconds=0.1)  # between checks of the heartbeat while waiting
GRACE_SECONDS = 2.0  # in which an ended rank's last messages arrive, and all its connections close
SHARDED = DevicesConfig(way=Parallelism.sharded)
STOPPED = "start the same command again to resume"


class Ranks(Closing):
    """This process as a rank of a run: its number, and communication with the other ranks. `machines`: a string per
    rank that identifies its machine.

    All ranks must make the same calls in the same order, except `ended_ranks`, `stop`, `is_stopping`, `require_alive`
    and `require_running`. Raises PeerEnded if ranks do not all join, or one ends later."""

    def __init__(
        self, launch: Launch, should_stop: Callable[[], bool] = lambda: False, devices: DevicesConfig = SHARDED
    ):
        """Waits until all ranks have joined. Raises Interrupted if `should_stop` returns True before that."""
        self.rank, self.size, self.devices = launch.rank, launch.size, devices
        self._heartbeat: Heartbeat | None = None
        self._session = 0
        self.group = _join_group(launch, should_stop)
        # Processes with equal strings can share memory: same boot, same container, same Slurm node. Slurm limits memory
        # per node, even if several nodes are on one machine.
        boot, container = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), Path("/proc/self/ns/pid").stat()
        machine = f"{boot} {container.st_ino} {os.environ.get('SLURMD_NODENAME', '')}"
        self.machines = [str(each["machine"]) for each in self.exchange({"machine": machine})]
        self._heartbeat = Heartbeat.connect(
            self.rank, self.size, self.exchange, launch.host, is_local=self.is_on_one_machine
        )

    def close(self) -> None:
        """Leaves the group. Other ranks may have ended already."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        dist.destroy_process_group()

    @property
    def is_on_one_machine(self) -> bool:
        return len({*self.machines}) == 1

    @property
    def num_local_ranks(self) -> int:
        """Number of ranks on this machine."""
        return self.machines.count(self.machines[self.rank])

    @property
    def local_rank(self) -> int:
        """Index of this rank among those on its machine."""
        return self.machines[: self.rank].count(self.machines[self.rank])

    @property
    def uses_shared_memory(self) -> bool:
        """True if ranks read weights into shared memory."""
        gather = self.devices.gather
        if self.devices.way is Parallelism.tensor:
            return False
        return gather is Gather.memory or (gather is Gather.auto and self.is_on_one_machine)

    def new_group(self) -> dist.ProcessGroup:
        """Creates another process group of all ranks. Its collectives need no common order with those of other
        groups."""
        group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup), "every rank is in the group"
        return group

    def exchange(self, message: Message) -> list[Message]:
        """Sends a message to all ranks. Blocks until all have sent one; returns the messages in the order of ranks."""
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        sizes = self._all_gather(torch.tensor([len(data)]))
        longest = max(int(size) for size in sizes)
        messages = self._all_gather(torch.nn.functional.pad(data, (0, longest - len(data))))
        return [json.loads(data[: int(size)].numpy().tobytes()) for data, size in zip(messages, sizes, strict=True)]

    def broadcast(self, message: Message) -> None:
        """Sends a message from rank 0; the others call `receive`."""
        self.exchange(message)

    def receive(self) -> Message:
        """Waits for rank 0's `broadcast`."""
        return self.exchange({})[0]

    def ended_ranks(self) -> list[int]:
        """Ranks that have ended."""
        return [] if self._heartbeat is None else self._heartbeat.ended_ranks()

    def require_alive(self) -> None:
        """Raises PeerEnded if a rank has ended."""
        if ended := self.ended_ranks():
            raise self._peer_ended(ended)

    def begin_session(self) -> None:
        """Begins a new session, which has not been asked to stop."""
        self._session += 1
        if self._heartbeat is not None:
            self._heartbeat.forget_old_stops(self._session)

    @property
    def is_stopping(self) -> bool:
        """True if any rank was asked to stop in this session."""
        return self._heartbeat is not None and self._heartbeat.is_stopping(self._session)

    def stop(self) -> None:
        """Asks all ranks to stop this session. Ranks that wait for others stop at once."""
        if self._heartbeat is not None:
            self._heartbeat.stop(self._session)

    def require_running(self) -> None:
        """Raises PeerEnded if a rank has ended, Interrupted if one was asked to stop."""
        self.require_alive()
        if self.is_stopping:
            raise Interrupted(STOPPED)

    def wait(self, is_done: Callable[[timedelta], bool]) -> None:
        """Blocks until `is_done(timeout)` returns True; `is_done` itself must wait up to `timeout`. Raises PeerEnded,
        and errors of `is_done`."""
        deadline = None
        while not is_done(CHECK_TIMEOUT):
            if deadline is None and self.ended_ranks():
                deadline = time.monotonic() + GRACE_SECONDS  # the ended rank's last message may still arrive
            if deadline is not None and time.monotonic() > deadline:
                raise self._peer_ended(self.ended_ranks())

    def run(self, begin: Callable[[], dist.Work | None]) -> None:
        """Runs a collective and blocks until it is done. Raises PeerEnded."""
        try:
            work = begin()
            assert work is not None, "this rank is in the group"
            self.wait(partial(_wait_for_work, work))
        except RuntimeError as error:
            raise self.explain_failure(error) from error

    def _all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(part) for _ in range(self.size)]
        self.run(lambda: dist.all_gather(gathered, part, group=self.group, async_op=True))
        return gathered

    def explain_failure(self, error: RuntimeError) -> Interrupted:
        """Returns the error for a failed collective. Waits up to `GRACE_SECONDS` for the heartbeat to show which rank
        ended, since connections of a process do not close all at once."""
        deadline = time.monotonic() + GRACE_SECONDS
        while not (ended := self.ended_ranks()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._peer_ended(ended) if ended else PeerEnded(f"lost the connection between ranks: {error}", ())

    def _peer_ended(self, ended: list[int]) -> PeerEnded:
        names, is_one = ", ".join(map(str, ended)), len(ended) == 1
        which = f"rank {names} of {self.size} has" if is_one else f"ranks {names} of {self.size} have"
        return PeerEnded(
            f"{which} ended, see {'its' if is_one else 'their'} error message; start the same command again to resume, "
            "with any number of ranks",
            ended,
        )


def _wait_for_work(work: dist.Work, seconds: timedelta) -> bool:
    """Waits up to `seconds`. Returns True if the collective is done; raises RuntimeError if it failed."""
    try:
        work.wait(seconds)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def _join_group(launch: Launch, should_stop: Callable[[], bool]) -> dist.ProcessGroup:
    """Waits for all ranks to join. Joins on a daemon thread, since `init_process_group` cannot be interrupted."""
    answers = SimpleQueue[dist.ProcessGroup | Exception]()
    Thread(target=_init_process_group, args=(launch, answers), name="ranks-meet", daemon=True).start()
    while answers.empty():
        if should_stop():
            raise Interrupted("stopped before all ranks had joined: nothing was begun")
        time.sleep(STOP_CHECK_SECONDS)
    answer = answers.get()
    if isinstance(answer, dist.ProcessGroup):
        return answer
    reason = str(answer).partition("\n")[0]
    raise PeerEnded(
        f"rank {launch.rank} of {launch.size} cannot join the run at {launch.url}: {reason}", ()
    ) from answer


def _init_process_group(launch: Launch, answers: "SimpleQueue[dist.ProcessGroup | Exception]") -> None:
    try:
        dist.init_process_group(
            "gloo", init_method=launch.url, rank=launch.rank, world_size=launch.size, timeout=JOIN_TIMEOUT
        )
        group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup), "every rank is in the group"
        answers.put(group)
    except (RuntimeError, ValueError) as error:
        answers.put(error)
