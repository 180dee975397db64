"""How ranks see at any moment, whatever they wait for, that another has ended or has been asked to stop, on whichever
machine it is: by a connection between each two, over which nothing goes but the number of a session that is to stop.
"""

import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ..closing import Closing
from ..errors import PeerEnded

Exchange: TypeAlias = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
NUM_SESSIONS = 256  # a session is told by one byte
PATIENCE_SECONDS = 60.0  # for a connection to a rank that listens
GREETING = struct.Struct("!16sI")  # a word that all ranks know, and the rank that connects
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))  # seconds, seconds, times


class Watch(Closing):
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
    def of(rank: int, size: int, exchange: Exchange, host: str, *, is_local: bool) -> "Watch":
        """Connects all ranks, each of which calls this. `host` is where rank 0 can be reached. Raises PeerEnded."""
        address = "127.0.0.1" if is_local else host if not rank else own_address(host)
        connections = dict[int, socket.socket]()
        try:
            with _listening(is_local=is_local) as listening:
                listening.settimeout(PATIENCE_SECONDS)
                met = exchange({"at": [address, listening.getsockname()[1]], "word": secrets.token_hex(16)})
                word = bytes.fromhex(met[0]["word"])
                for other in range(rank):
                    connections[other] = socket.create_connection(tuple(met[other]["at"]), PATIENCE_SECONDS)
                    connections[other].sendall(GREETING.pack(word, rank))
                while len(connections) < size - 1:
                    connection, _ = listening.accept()
                    if (other := _greeted(connection, word)) is None:
                        connection.close()
                    else:
                        connections[other] = connection
        except OSError as error:
            missing = sorted({*range(size)} - {*connections, rank})
            raise PeerEnded(
                f"rank {rank} has no connection to rank {missing[0]}: {error}; ranks reach one another at any port",
                (),
            ) from error
        return Watch(connections)

    def close(self) -> None:
        for each in self._connections.values():
            each.close()

    def ended(self) -> list[int]:
        """The ranks whose connections have ended, as they do with the process."""
        self._look()
        return sorted(self._ended)

    def begin(self, session: int) -> None:
        """What was said of sessions long ago holds no more."""
        self._stopping.discard((session + NUM_SESSIONS // 2) % NUM_SESSIONS)

    def is_stopping(self, session: int) -> bool:
        """Whether a rank has said that this session is to stop."""
        self._look()
        return session % NUM_SESSIONS in self._stopping

    def stop(self, session: int) -> None:
        """Tells all others, as far as they are there."""
        self._stopping.add(session % NUM_SESSIONS)
        for rank, each in self._connections.items():
            try:
                each.send(bytes([session % NUM_SESSIONS]))
            except OSError:
                self._ended.add(rank)

    def _look(self) -> None:
        for rank, each in self._connections.items():
            if rank in self._ended:
                continue
            try:
                heard = each.recv(NUM_SESSIONS)
            except BlockingIOError:
                continue
            except OSError:
                heard = b""
            self._stopping.update(heard)
            if not heard:
                self._ended.add(rank)


def own_address(host: str) -> str:
    """The address of this machine on the way to `host`, to which nothing is sent. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _listening(*, is_local: bool) -> socket.socket:
    if is_local:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _greeted(connection: socket.socket, word: bytes) -> int | None:
    """The rank that has connected; None where somebody else has."""
    connection.settimeout(PATIENCE_SECONDS)
    try:
        said, rank = GREETING.unpack(connection.recv(GREETING.size, socket.MSG_WAITALL))
    except (OSError, struct.error):
        return None
    return rank if secrets.compare_digest(said, word) else None
