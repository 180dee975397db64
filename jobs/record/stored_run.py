"""The copy of a run in an object store (`output_url`), from which another machine can continue the run.

Files are uploaded when they are complete: the plan before the first block, a part before its block counts as done,
`_SUCCESS.json` last. Only one run directory writes the copy at a time. If the run is started from another directory,
that directory takes over, and the process of the previous directory stops before its next upload.
"""

import json
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path

from runtime.config.texts import url_child
from runtime.errors import DamagedRunError, RunInUseError, StorageError, WeightstreamError
from runtime.remote.object_store import ObjectStore, RetryPolicy, StoredFile, never
from runtime.units import format_count

from ..config.settings import RunSettings
from ..files.publishing import (
    JsonValue,
    canonical_json,
    move_to_quarantine,
    output_error,
    publish,
    read_json,
    write_all,
    write_json,
)
from .run_dir import RunDirectory

log = logging.getLogger(__name__)

URL_KEY, RETRY_KEY = "output_url", "upload_retry_seconds"
MANIFEST_NAME, WRITER_NAME = "run.json", "writer.json"
# The names of files that are downloaded. Other files in the store are ignored.
RUN_FILE = re.compile(r"(?:(?:generations|throughput)/)?[A-Za-z0-9_][A-Za-z0-9._-]*\.(?:json|jsonl|parquet|txt)")
NUM_FETCHES = 8  # parallel downloads


class RunCopy:
    """The interface of a run's copy. This class is for runs without a copy, and does nothing."""

    @property
    def stored_manifest(self) -> Mapping[str, JsonValue] | None:
        """The content of run.json in the copy; None if there is none. Raises DamagedRunError."""
        return None

    def attach(self) -> None:
        """Takes over the copy for this directory, and downloads missing files. The caller holds the run's lock.

        All methods may raise OutputError, StorageError, RunInUseError and Interrupted. No local files are lost then.
        """

    def upload_missing(self, *paths: Path) -> None:
        """Uploads files that never change, if the copy does not have them."""

    def upload_part(self, throughput: Path, generations: Path) -> None:
        """Uploads the two files of a new part. If the copy already has another part of this block, downloads it and
        replaces the local one."""

    def finish(self, *, is_new: bool) -> None:
        """Uploads the summary and `_SUCCESS.json` of a finished run. If not `is_new`, only if the copy has no
        `_SUCCESS.json`."""

    def upload(self, *paths: Path) -> None:
        """Uploads files and replaces those in the copy. Skips files that do not exist locally."""

    def try_upload(self, path: Path) -> None:
        """Uploads an optional file without retries. Logs a failure."""

    def try_remove(self, path: Path) -> None:
        """Removes a file that `try_upload` uploaded. Logs a failure."""


class StoredRun(RunCopy):
    """The copy in `store` of the run in `directory`."""

    def __init__(self, store: ObjectStore, directory: RunDirectory):
        self._store, self._directory = store, directory
        self._store_without_retries = ObjectStore(store.url, store.key, RetryPolicy(seconds=0))
        self._files: dict[str, StoredFile] = {**store.list_files(is_deep=True)}
        self._manifest = self._read_json(MANIFEST_NAME) if MANIFEST_NAME in self._files else None

    @property
    def stored_manifest(self) -> Mapping[str, JsonValue] | None:
        return self._manifest

    def attach(self) -> None:
        writer = self._read_json(WRITER_NAME) if WRITER_NAME in self._files else {}
        is_ours = writer.get("token") == self._token
        if writer and not is_ours:
            log.info("%s: taking over from %s, pid %s", self._store.url, writer.get("host"), writer.get("pid"))
        record = {"token": self._token, "host": socket.gethostname(), "pid": os.getpid()}
        self._store.write(WRITER_NAME, canonical_json(record).encode(), is_first=True)
        # Listed after taking over, because the previous writer may have uploaded files until then.
        self._files = {**self._store.list_files(is_deep=True)}
        names = [name for name in self._files if RUN_FILE.fullmatch(name) and name not in (MANIFEST_NAME, WRITER_NAME)]
        try:
            with ThreadPoolExecutor(NUM_FETCHES) as pool:
                num_fetched = sum(pool.map(partial(self._fetch, is_ours=is_ours), names))
        except OSError as error:
            raise output_error(self._directory.path, error) from error
        if num_fetched:
            log.info("%s: fetched %s", self._store.url, format_count(num_fetched, "file"))
        self.upload_missing(self._directory.manifest)

    def upload_missing(self, *paths: Path) -> None:
        new = self._missing_files(paths)
        if len(new) > 1:  # other workers may have uploaded some since the last listing
            self._files |= self._store.list_files(is_deep=True)
            self._drop_size_mismatches(new)
            new = self._missing_files(new)
        if new:
            self._require_writer()
        for path in new:
            self._upload_exclusive(path)

    def upload_part(self, throughput: Path, generations: Path) -> None:
        self._require_writer()
        self._upload_file(throughput)
        if self._stored_name(generations) in self._files:  # regenerated after local damage
            self._upload_file(generations)
        else:
            self._upload_exclusive(generations)

    def finish(self, *, is_new: bool) -> None:
        run = self._directory
        if not is_new and self._stored_name(run.success) in self._files:
            return
        self.upload(run.schedule, run.summary, run.success)  # in this order: _SUCCESS.json last
        for name in [name for name in self._files if name.startswith("running")]:
            self.try_remove(run.path / name)

    def upload(self, *paths: Path) -> None:
        self._require_writer()
        for path in paths:
            if path.exists():
                self._upload_file(path)

    def try_upload(self, path: Path) -> None:
        name = self._stored_name(path)
        try:
            self._store_without_retries.write(name, path.read_bytes())
            self._files[name] = StoredFile(num_bytes=0, tag="")
        except (WeightstreamError, OSError) as error:
            log.warning("the checkpoint was saved locally but not uploaded: %s", error)

    def try_remove(self, path: Path) -> None:
        if self._files.pop(self._stored_name(path), None) is None:
            return
        try:
            self._store_without_retries.remove(self._stored_name(path))
        except WeightstreamError as error:
            log.warning("%s is no longer needed but cannot be removed: %s", self._stored_name(path), error)

    def _missing_files(self, paths: Sequence[Path]) -> list[Path]:
        return [path for path in paths if self._stored_name(path) not in self._files and path.exists()]

    def _drop_size_mismatches(self, paths: Sequence[Path]) -> None:
        """Treats files in the copy as missing if their size differs from the local file."""
        for path in paths:
            stored = self._files.get(self._stored_name(path))
            if stored is not None and stored.num_bytes != path.stat().st_size:
                del self._files[self._stored_name(path)]

    @cached_property
    def _token(self) -> str:
        """The random id of this directory, the same for all its workers. Raises OutputError."""
        path = self._directory.store_token
        if not path.exists():
            write_json(path, {"token": secrets.token_hex(16)}, exclusive=True)
        return str(read_json(path).get("token"))

    def _require_writer(self) -> None:
        """Raises RunInUseError if another directory has taken over the copy."""
        try:
            writer = self._read_json(WRITER_NAME)
        except FileNotFoundError as error:
            raise StorageError(
                f"{self._store.url} ({URL_KEY}) was emptied: run the same command again to upload the local files"
            ) from error
        if writer.get("token") != self._token:
            raise RunInUseError(
                f"{self._store.url} ({URL_KEY}) was taken over by pid {writer.get('pid')} on host "
                f"{json.dumps(writer.get('host'))}: this process stops. The files in {self._directory.path} stay; to "
                "resume here, stop the other process first"
            )

    def _fetch(self, name: str, *, is_ours: bool) -> bool:
        """Downloads a file if the local one is missing or differs; returns True then. `is_ours`: this directory wrote
        the copy. A local file of another size than the copy is then uploaded again later. Raises OSError."""
        path = self._directory.path / name
        if is_ours and path.exists():
            self._drop_size_mismatches([path])
            return False
        try:
            data = self._store.read(name)
        except FileNotFoundError:  # removed since it was listed
            return False
        if path.exists() and path.read_bytes() == data:
            return False
        self._replace(path, data)
        return True

    def _replace(self, path: Path, data: bytes) -> None:
        if path.exists() and path.parent != self._directory.path:  # a part
            move_to_quarantine(path, self._directory.quarantine, f"{self._store.url} already had another one")
        publish(path, lambda file: write_all(file, data), exclusive=False, expected_bytes=len(data))

    def _upload_exclusive(self, path: Path) -> None:
        """Uploads a file that the copy does not have. If it has one meanwhile, that replaces the local file."""
        name = self._stored_name(path)
        data = path.read_bytes()
        try:
            self._store.write(name, data, exclusive=True)
        except FileExistsError:  # uploaded by another worker, or by an attempt of this call that seemed to fail
            stored_data = self._store.read(name)
            if stored_data != data:
                self._replace(path, stored_data)
        self._files[name] = StoredFile(num_bytes=len(data), tag="")

    def _upload_file(self, path: Path) -> None:
        data = path.read_bytes()
        self._store.write(self._stored_name(path), data)
        self._files[self._stored_name(path)] = StoredFile(num_bytes=len(data), tag="")

    def _stored_name(self, path: Path) -> str:
        return path.relative_to(self._directory.path).as_posix()

    def _read_json(self, name: str) -> dict[str, JsonValue]:
        try:
            value = json.loads(self._store.read(name))
        except ValueError as error:
            raise DamagedRunError(f"{url_child(self._store.url, name)} is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise DamagedRunError(f"{url_child(self._store.url, name)} is no JSON object")
        return value


def upload_batch_files(config: RunSettings, directory: Path) -> None:
    """Uploads the OpenAI batch files of a finished run. Raises the errors of `RunCopy`."""
    run = RunDirectory(path=directory)
    open_copy(config, directory, never).upload(run.batch_output, run.batch_errors)


def open_copy(config: RunSettings, directory: Path, should_stop: Callable[[], bool]) -> RunCopy:
    """The copy of the run in `directory`, at `output_url`. Raises ConfigError if the store cannot be read."""
    if config.output_url is None:
        return RunCopy()
    url = url_child(config.output_url, directory.relative_to(config.output_root).as_posix())
    retry = RetryPolicy(seconds=config.upload_retry_seconds, should_stop=should_stop, key=RETRY_KEY)
    return StoredRun(ObjectStore(url, URL_KEY, retry), RunDirectory(path=directory))
