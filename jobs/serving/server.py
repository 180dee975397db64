"""Starts and stops the server: HTTP routes, and the keeper that runs batches. Needs the `serve` extra."""

# pyright: reportMissingImports=false

import asyncio
import logging
import resource
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from runtime.errors import ConfigError, RunInUseError, require

from ..config.settings import GenerateConfig
from ..files.locks import RunLock
from ..files.publishing import GROUP_AND_OTHERS, make_directory, private_umask, publish, write_all
from .answers import Answers
from .app import make_app
from .config import ServeConfig
from .keeper import Keeper
from .store import BatchStore

log = logging.getLogger(__name__)
MIN_KEY_CHARACTERS = 16
IDLE_SECONDS = 60  # a connection without a request is closed after this time
SHUTDOWN_SECONDS = 10  # time for responses in progress
MAX_CONNECTIONS = 500
LOG_INTERVAL_SECONDS = 60.0


def serve(config: ServeConfig, job: GenerateConfig) -> None:
    """Serves until interrupted. A running job then continues, and the next server adopts it. `job`: the settings for
    single requests, with absolute paths. Raises ConfigError, OutputError."""
    output_root, models = Path(config.output_root), [job.model.path or job.model.name]
    make_directory(output_root)
    with private_umask(), _lock_server_folder(output_root, config) as folder:
        key = _api_key(config, folder) if config.require_api_key else None  # before listening: clients read it
        with _open_listener(config) as listener:
            for handler in logging.getLogger().handlers:
                handler.addFilter(_RepeatFilter())
            logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each rejected form
            store = BatchStore(folder)
            keeper = Keeper(store, config.settings, output_root)
            answers = Answers(config, job, folder, keeper)
            url = f"http://{listener.getsockname()[0]}:{config.port}/v1"
            log.info("serving %s; batches are in %s", url, output_root / "generate")
            if key is None:
                log.warning("require_api_key=false: every user of this machine can start batches and read every file")
            else:
                key_path = config.api_key_file or folder / "api_key"
                log.info('clients need a key: export OPENAI_BASE_URL=%s OPENAI_API_KEY="$(cat %s)"', url, key_path)
            if not config.is_loopback:
                log.warning("host=%s: network traffic, including the key, is not encrypted", config.host)
            keeper.start()
            try:
                uvicorn.Server(
                    uvicorn.Config(
                        make_app(config, store, keeper, answers, key, models),
                        http=_Connection,
                        ws="none",
                        lifespan="off",
                        log_config=None,
                        access_log=False,
                        server_header=False,
                        backlog=min(128, _max_connections()),
                        timeout_keep_alive=IDLE_SECONDS,
                        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
                        h11_max_incomplete_event_size=64 * 1024,
                    )
                ).run(sockets=[listener])
            finally:
                keeper.stop()
                answers.stop()


@contextmanager
def _lock_server_folder(output_root: Path, config: ServeConfig) -> Iterator[Path]:
    """Context manager: creates, locks and returns the folder of the server's records."""
    folder = make_directory(output_root / "serve")
    try:
        lock = RunLock(folder / ".lock")
    except RunInUseError as error:
        raise ConfigError(
            f"another server uses output_root={config.output_root}: stop it, or choose another output_root= ({error})"
        ) from error
    except OSError as error:
        raise ConfigError(f"output_root={config.output_root} cannot be used: {error}") from error
    try:
        yield folder
    finally:
        lock.release()


@contextmanager
def _open_listener(config: ServeConfig) -> Iterator[socket.socket]:
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on host={config.host} port={config.port}: {error}") from error
    with listener:
        yield listener


def _api_key(config: ServeConfig, folder: Path) -> str:
    """Reads the API key from `api_key_file`, or from a file in `folder`, which is created if missing."""
    path = Path(config.api_key_file).expanduser() if config.api_key_file else folder / "api_key"
    if config.api_key_file is None and not path.exists():
        new_key = secrets.token_urlsafe(32)
        publish(path, lambda file: write_all(file, f"{new_key}\n".encode()), exclusive=True)
    try:
        mode = path.stat().st_mode
        require(stat.S_ISREG(mode), f"api_key_file={path} is not a file")
        require(
            not mode & GROUP_AND_OTHERS,
            f"api_key_file={path} is accessible to other users (mode {mode & 0o777:o}): chmod 600 {path}",
        )
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"api_key_file={path} cannot be read: {error}") from error
    require(
        len(key) >= MIN_KEY_CHARACTERS and key.isprintable() and " " not in key,
        f"api_key_file={path} must contain one word of {MIN_KEY_CHARACTERS} characters or more",
    )
    return key


def _max_connections() -> int:
    """Connection limit; leaves file descriptors for uploads, three for each."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft // 4))


class _Connection(H11Protocol):
    """uvicorn connection that is closed when idle; above the connection limit, the longest idle one is closed."""

    last_received_at: float = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.last_received_at = self.loop.time()
        self.loop.call_later(IDLE_SECONDS, self._close_if_idle)
        if len(self.connections) > _max_connections():
            log.warning("more than %d connections: closing the longest idle one", _max_connections())
            open_connections = [other for other in self.connections if isinstance(other, _Connection)]
            candidates = [other for other in open_connections if not other.is_responding]
            idle = min(candidates, key=lambda other: other.last_received_at, default=self)
            self.connections.discard(idle)
            idle.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.last_received_at = self.loop.time()
        super().data_received(data)

    @property
    def has_request(self) -> bool:
        """True while a request is in progress, including its upload."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_responding(self) -> bool:
        """True if the request is complete and the response is not."""
        return self.has_request and not self.cycle.more_body

    def _close_if_idle(self) -> None:
        if self.transport.is_closing():
            return
        if not self.has_request and self.last_received_at + IDLE_SECONDS <= self.loop.time():
            self.transport.abort()
        else:
            self.loop.call_later(IDLE_SECONDS, self._close_if_idle)


class _RepeatFilter(logging.Filter):
    """Logs identical warnings once per `LOG_INTERVAL_SECONDS`, with the number of repeats: without free file
    descriptors, asyncio logs thousands a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, tuple[float, int]] = {}  # message -> time, repeats since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now, text = time.monotonic(), record.getMessage()
        self._logged = {key: entry for key, entry in self._logged.items() if entry[0] > now - 2 * LOG_INTERVAL_SECONDS}
        logged_at, num_repeats = self._logged.get(text, (-LOG_INTERVAL_SECONDS, 0))
        if now - logged_at < LOG_INTERVAL_SECONDS:
            self._logged[text] = (logged_at, num_repeats + 1)
            return False
        self._logged[text] = (now, 0)
        if num_repeats:
            record.msg, record.args = f"{text} ({num_repeats} repeats)", ()
        return True
