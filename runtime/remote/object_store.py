"""Files below a URL of an object store, by fsspec. The store's own library finds credentials and endpoints; they are
never stored or logged here. Failed calls are retried with exponential backoff for a bounded time.
"""

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..config.texts import require_plain_url, url_child
from ..errors import ConfigError, Interrupted, StorageError, WeightstreamError

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
STOP_CHECK_SECONDS = 0.2  # how often a pause looks whether the job shall stop
MAX_CHARACTERS = 200
T = TypeVar("T")


def never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Retry time in seconds and the function that can end it. `key`: the setting of the time, for messages."""

    seconds: float = 300.0
    should_stop: Callable[[], bool] = never
    key: str | None = None

    def run(self, action: str, call: Callable[[], T], *, permanent: tuple[type[Exception], ...] = ()) -> T:
        """What `call` comes to, which does `what`. Errors of ours, FileExistsError and `permanent` ones pass at once.

        Every other Exception is a failure that may pass, since what the libraries of stores raise has no common root.
        Raises StorageError when time is up, Interrupted when the job shall stop.
        """
        deadline, pause = time.monotonic() + self.seconds, FIRST_PAUSE_SECONDS
        while True:
            try:
                return call()
            except (WeightstreamError, FileExistsError, *permanent):
                raise
            except Exception as error:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    key = f" ({self.key})" if self.key is not None else ""
                    raise StorageError(
                        f"{action} failed: {describe_error(error)}; it was tried for {self.seconds:g} s{key}. "
                        "Nothing is lost: start the same command again"
                    ) from error
                pause = min(pause, remaining)
                log.warning(
                    "%s failed: %s; retry in %.1f s, %.0f s left", action, describe_error(error), pause, remaining
                )
            again_at = time.monotonic() + pause
            while (remaining := again_at - time.monotonic()) > 0:
                if self.should_stop():
                    raise Interrupted(f"stopped while retrying {action}; start the same command again to resume")
                time.sleep(min(remaining, STOP_CHECK_SECONDS))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def describe_error(error: Exception) -> str:
    """The error's type and text in one line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}  # of ours, by scheme
TAGS = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "created")
PERMANENT_ERRORS = (FileNotFoundError, PermissionError)  # where nothing was begun: a mistake in the command


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file's metadata in its store. `tag` changes when the file is rewritten."""

    num_bytes: int
    tag: str
    is_file: bool = True


class ObjectStore:
    """What lies below `url`, which the setting `key` names. Names of files are what follows on the URL and a slash.

    All of it raises StorageError where the store fails for longer than `retry`, and Interrupted.
    """

    def __init__(self, url: str, key: str, retry: RetryPolicy | None = None):
        """Raises ConfigError for a URL with credentials, of an unknown scheme, or whose library is not installed."""
        require_plain_url(url, key)
        self.url, self.key, self.retry = url.rstrip("/"), key, retry or RetryPolicy()
        scheme = self.url.partition("://")[0]
        options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            extra = f"'weightstream[{EXTRAS[scheme]}]'" if scheme in EXTRAS else "what it names"
            raise ConfigError(
                f"{key}={self.url} needs a library ({describe_error(error)}): pip install {extra}"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{key}={self.url} is of no scheme that fsspec knows: {describe_error(error)}") from error

    def list_files(self, *, is_deep: bool) -> Mapping[str, StoredFile]:
        """The files below the URL, by name; `is_deep`: those in folders too. The name of a URL that is a file is empty.
        Nothing where there is none. Raises ConfigError where nobody may look."""
        return self._call_first("listing", lambda: self._list(is_deep), {})

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        """The bytes of a file, or those in a range. Raises FileNotFoundError."""
        call = partial(self._fs.cat_file, self._path(name), start=begin, end=end)
        return self._call("reading", name, call, permanent=(FileNotFoundError,))

    def write(self, name: str, data: bytes, *, exclusive: bool = False, is_first: bool = False) -> None:
        """Puts a file there, of which a reader sees all or nothing. `exclusive`: raises FileExistsError where one is
        there. `is_first`: of all that is written, so that a bucket that is not there, or not ours, is a ConfigError."""
        call = partial(self._write, self._path(name), data, exclusive)
        if is_first:
            self._call_first(f"writing {name}", call, None)
        else:
            self._call("writing", name, call)

    def remove(self, name: str) -> None:
        """Takes a file away, which may be gone already."""
        with suppress(FileNotFoundError):
            self._call("removing", name, partial(self._fs.rm_file, self._path(name)), permanent=(FileNotFoundError,))

    def _path(self, name: str) -> str:
        return url_child(self._root, name) if name else self._root

    def _call(self, action: str, name: str, call: Callable[[], T], *, permanent: tuple[type[Exception], ...] = ()) -> T:
        url = url_child(self.url, name) if name else self.url
        return self.retry.run(f"{action} {url} ({self.key})", call, permanent=permanent)

    def _call_first(self, action: str, call: Callable[[], T], absent: T | None) -> T:
        """A call that is among the first: what cannot pass is refused at once, but for `absent` where that is given."""
        try:
            return self.retry.run(f"{action} at {self.url} ({self.key})", call, permanent=PERMANENT_ERRORS)
        except PERMANENT_ERRORS as error:
            if absent is not None and isinstance(error, FileNotFoundError):
                return absent
            raise ConfigError(
                f"{self.key}={self.url}: {action} was refused ({describe_error(error)}): check the URL, and the "
                "credentials in the environment or in the files of the store's own tools"
            ) from error

    def _list(self, is_deep: bool) -> dict[str, StoredFile]:
        self._fs.invalidate_cache()
        info = _parse_info(self._fs.info(self._root)) if not is_deep else None
        if info is not None and info.is_file:
            return {"": info}
        self._fs.invalidate_cache()
        entries = self._fs.find(self._root, detail=True).values() if is_deep else self._fs.ls(self._root, detail=True)
        files = {info["name"].removeprefix(self._root).lstrip("/"): _parse_info(info) for info in entries}
        return {name: file for name, file in files.items() if file.is_file}

    def _write(self, path: str, data: bytes, exclusive: bool) -> None:
        fs = self._fs
        if exclusive and fs.exists(path):
            raise FileExistsError(path)
        if isinstance(fs, LocalFileSystem):  # whose readers would see a half
            folder, _, name = path.rpartition("/")
            temp = f"{folder}/.{name}.{secrets.token_hex(4)}.tmp"
            fs.pipe_file(temp, data)
            fs.mv(temp, path)
        else:
            fs.pipe_file(path, data, mode="create" if exclusive else "overwrite")


def _parse_info(info: Mapping[str, Any]) -> StoredFile:
    tag = next((str(info[name]) for name in TAGS if info.get(name) is not None), "")
    return StoredFile(num_bytes=int(info.get("size") or 0), tag=tag, is_file=info["type"] == "file")
