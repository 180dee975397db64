"""Files below a URL of an object store, accessed with fsspec. Failed calls are retried with exponential backoff for a
limited time. The store's own library finds credentials and endpoints; they are never stored or logged here.
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
STOP_CHECK_SECONDS = 0.2  # between checks of `should_stop`
MAX_CHARACTERS = 200  # limit for the text of an exception in a message
T = TypeVar("T")


def never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long failed calls are retried: for `seconds`, or until `should_stop` returns True. `key`: the setting that
    `seconds` comes from, for messages."""

    seconds: float = 300.0
    should_stop: Callable[[], bool] = never
    key: str | None = None

    def run(self, action: str, call: Callable[[], T], *, permanent: tuple[type[Exception], ...] = ()) -> T:
        """Returns `call()`, retried with exponential backoff. WeightstreamError, FileExistsError and `permanent`
        exceptions are not retried. Raises StorageError after `seconds`, and Interrupted. `action` describes the call in
        messages."""
        # Retries every other Exception, since the exceptions of store libraries have no common base class.
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
                        f"{action} failed: {describe_error(error)}; retried for {self.seconds:g} s{key}; nothing is "
                        "lost: start the same command again"
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
    """Formats an exception's type and text in one line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}  # URL scheme -> extra of this package to install
# Keys of fsspec's file information that change when the file is rewritten; stores have different ones.
TAGS = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "created")
PERMANENT_ERRORS = (FileNotFoundError, PermissionError)  # in the first call: the URL or credentials are wrong


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Size and kind of a stored file. `tag` changes when the file is rewritten."""

    num_bytes: int
    tag: str
    is_file: bool = True


class ObjectStore:
    """Files below `url`. A file's name is its path relative to `url`. `key`: the setting that `url` comes from, for
    messages. All methods raise Interrupted, and StorageError if the store fails for longer than `retry`."""

    def __init__(self, url: str, key: str, retry: RetryPolicy | None = None):
        """Raises ConfigError if the URL has credentials or an unknown scheme, or its library is not installed."""
        require_plain_url(url, key)
        self.url, self.key, self.retry = url.rstrip("/"), key, retry or RetryPolicy()
        scheme = self.url.partition("://")[0]
        options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            extra = f"'weightstream[{EXTRAS[scheme]}]'" if scheme in EXTRAS else "that library"
            raise ConfigError(
                f"{key}={self.url}: a library is missing ({describe_error(error)}): pip install {extra}"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{key}={self.url}: fsspec does not know the scheme: {describe_error(error)}") from error

    def list_files(self, *, is_deep: bool) -> Mapping[str, StoredFile]:
        """Lists the files below the URL: name -> file. `is_deep`: also in subdirectories. If the URL is itself a file,
        its name is "". Returns {} if nothing exists. Raises ConfigError if access is denied."""
        return self._call_first("listing", lambda: self._list(is_deep), {})

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        """Reads a file or a byte range of it. Raises FileNotFoundError."""
        call = partial(self._fs.cat_file, self._path(name), start=begin, end=end)
        return self._call("reading", name, call, permanent=(FileNotFoundError,))

    def write(self, name: str, data: bytes, *, exclusive: bool = False, is_first: bool = False) -> None:
        """Writes a file atomically. `exclusive`: raises FileExistsError if the file exists. `is_first`: for the first
        write of a run; a missing bucket or denied access then raises ConfigError at once."""
        call = partial(self._write, self._path(name), data, exclusive)
        if is_first:
            self._call_first(f"writing {name}", call, None)
        else:
            self._call("writing", name, call)

    def remove(self, name: str) -> None:
        """Deletes a file if it exists."""
        with suppress(FileNotFoundError):
            self._call("removing", name, partial(self._fs.rm_file, self._path(name)), permanent=(FileNotFoundError,))

    def _path(self, name: str) -> str:
        return url_child(self._root, name) if name else self._root

    def _call(self, action: str, name: str, call: Callable[[], T], *, permanent: tuple[type[Exception], ...] = ()) -> T:
        url = url_child(self.url, name) if name else self.url
        return self.retry.run(f"{action} {url} ({self.key})", call, permanent=permanent)

    def _call_first(self, action: str, call: Callable[[], T], absent: T | None) -> T:
        """Runs the first call on this store, for which permanent errors raise ConfigError. If the file is missing and
        `absent` is not None, returns `absent`."""
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
        self._fs.invalidate_cache()  # fsspec caches listings, which other processes may have changed
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
        if isinstance(fs, LocalFileSystem):  # write and rename, so that no reader sees a partial file
            folder, _, name = path.rpartition("/")
            temp = f"{folder}/.{name}.{secrets.token_hex(4)}.tmp"
            fs.pipe_file(temp, data)
            fs.mv(temp, path)
        else:
            fs.pipe_file(path, data, mode="create" if exclusive else "overwrite")


def _parse_info(info: Mapping[str, Any]) -> StoredFile:
    """Converts fsspec's file information."""
    tag = next((str(info[name]) for name in TAGS if info.get(name) is not None), "")
    return StoredFile(num_bytes=int(info.get("size") or 0), tag=tag, is_file=info["type"] == "file")
