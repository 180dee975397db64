"""Store of files and batches: JSON records in the API's format, and the contents of uploaded files."""

import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from runtime.errors import DamagedRunError
from runtime.units import KIB

from ..datasets.openai_body import ENCODE_ENDPOINTS, ENDPOINTS
from ..files.publishing import (
    PRIVATE_FOLDER_MODE,
    JsonValue,
    fsync_directory,
    make_directory,
    publish,
    read_json,
    sweep_temps,
    write_json,
)

log = logging.getLogger(__name__)
FILE_ID = re.compile(r"file-[0-9a-f]{24}(-output|-errors)?")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
FINAL = frozenset({"completed", "failed", "cancelled"})
STATUSES = FINAL | {"validating", "in_progress", "cancelling"}
URLS = (*ENDPOINTS, *ENCODE_ENDPOINTS)
UPLOAD_PURPOSE, RESULT_PURPOSE = "batch", "batch_output"  # values of `purpose` in the API
FILE_FIELDS = {"bytes": int, "created_at": int, "filename": str, "purpose": str, "path": str}
BATCH_FIELDS = {
    "created_at": int,
    "endpoint": str,
    "input_file_id": str,
    "completion_window": str,
    "status": str,
    "request_counts": dict,
}
MAX_RECORD_BYTES = 256 * KIB

JsonRecord = dict[str, JsonValue]


class UploadLimitError(Exception):
    """An upload would exceed the limits on uploads."""


class FileInUseError(Exception):
    """The file is the input of an unfinished batch."""


class BatchStore:
    """Records below `directory`; this process must be the only writer. Writes each change to disk before it becomes
    visible in memory. Thread-safe: records are replaced, never mutated."""

    def __init__(self, directory: Path):
        """Removes incomplete uploads of a killed server. Raises OutputError, OSError."""
        self._files = make_directory(directory / "files")
        self._batches = make_directory(directory / "batches")
        self.jobs = make_directory(directory / "jobs")  # cwd of jobs, writable only by this user
        for folder in (directory, self._files, self._batches, self.jobs):
            folder.chmod(PRIVATE_FOLDER_MODE)
            sweep_temps(folder, is_only_writer=True)
        for content in self._files.glob("*.jsonl"):
            if FILE_ID.fullmatch(content.stem) and not os.path.lexists(content.with_suffix(".json")):
                content.unlink()
        self._lock = threading.Lock()
        self._file_records = _load_records(self._files, FILE_ID, FILE_FIELDS)
        self._batch_records = _load_records(self._batches, BATCH_ID, BATCH_FIELDS)
        self._num_receiving = self._receiving_bytes = 0

    def content_path(self, id: str) -> Path:
        return self._files / f"{id}.jsonl"

    def log_path(self, batch_id: str) -> Path:
        """Path of a job's log; the job holds a lock on it while it runs."""
        return self._batches / f"{batch_id}.log"

    @contextmanager
    def reserve_space(self, num_bytes: int, max_files: int, max_bytes: int) -> Iterator[None]:
        """Context manager: counts an upload toward the limits while it is received. Raises UploadLimitError."""
        with self._lock:
            sizes = [_int(file["bytes"]) for file in self._file_records.values() if file["purpose"] == UPLOAD_PURPOSE]
            if len(sizes) + self._num_receiving >= max_files:
                raise UploadLimitError(f"max_files={max_files:,} is reached: DELETE uploaded files")
            if (used := sum(sizes) + self._receiving_bytes) + num_bytes > max_bytes:
                raise UploadLimitError(
                    f"uploaded files have {used:,} bytes; {num_bytes:,} more exceed max_uploads_gib "
                    f"({max_bytes:,} bytes): DELETE uploaded files"
                )
            self._num_receiving += 1
            self._receiving_bytes += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._num_receiving -= 1
                self._receiving_bytes -= num_bytes

    def add_upload(self, source: BinaryIO, filename: str) -> JsonRecord:
        """Stores a new file and returns its record. Raises OutputError, with nothing stored."""
        id = new_id("file-")
        path = self.content_path(id)
        try:
            publish(path, lambda file: shutil.copyfileobj(source, file), exclusive=True)
            return self.add_file(id, path, filename, UPLOAD_PURPOSE)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def add_file(self, id: str, path: Path, filename: str, purpose: str) -> JsonRecord:
        record: JsonRecord = {
            "id": id,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "path": str(path.absolute()),
        }
        with self._lock:
            write_json(self._files / f"{id}.json", record, exclusive=False)  # on disk first
            self._file_records[id] = record
        return record

    def file(self, id: str) -> JsonRecord | None:
        return self._file_records.get(id)

    def files(self) -> list[JsonRecord]:
        """All files, oldest first."""
        return _by_age(self._file_records)

    def delete_file(self, id: str) -> bool:
        """Removes the record, then the content. Returns False if there is no such file. Raises FileInUseError or
        OSError."""
        with self._lock:
            if (record := self._file_records.get(id)) is None:
                return False
            for batch in self._batch_records.values():
                if batch["input_file_id"] == id and batch["status"] not in FINAL:
                    raise FileInUseError(f"batch {batch['id']} ({batch['status']}) reads this file: cancel it first")
            (self._files / f"{id}.json").unlink(missing_ok=True)
            fsync_directory(self._files)  # a record must not return after a crash without its content
            del self._file_records[id]
            Path(str(record["path"])).unlink(missing_ok=True)
        return True

    def add_batch(
        self, input_file_id: str, endpoint: str, window: str, metadata: Mapping[str, str] | None, total: int
    ) -> JsonRecord | None:
        """Creates a batch and returns its record; None if its file was deleted meanwhile. Raises OutputError."""
        record: JsonRecord = {
            "id": new_id("batch_"),
            "object": "batch",
            "endpoint": endpoint,
            "input_file_id": input_file_id,
            "completion_window": window,
            "status": "validating",
            "created_at": int(time.time()),
            "request_counts": {"total": total, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        with self._lock:
            if input_file_id not in self._file_records:
                return None
            write_json(self._batches / f"{record['id']}.json", record, exclusive=True)
            self._batch_records[str(record["id"])] = record
        return record

    def batch(self, id: str) -> JsonRecord | None:
        return self._batch_records.get(id)

    def batches(self) -> list[JsonRecord]:
        """All batches, oldest first."""
        return _by_age(self._batch_records)

    def unfinished_batches(self) -> list[JsonRecord]:
        """Unfinished batches, oldest first."""
        unfinished = {id: batch for id, batch in list(self._batch_records.items()) if batch["status"] not in FINAL}
        return _by_age(unfinished)

    def update_batch(self, id: str, changes: Callable[[JsonRecord], Mapping[str, JsonValue]]) -> JsonRecord:
        """Merges `changes(record)` into the batch, atomically, and returns it; ended batches stay unchanged. Raises
        OutputError."""
        with self._lock:
            record = self._batch_records[id]
            if record["status"] not in FINAL and (new_values := changes(record)):
                record = {**record, **new_values}
                write_json(self._batches / f"{id}.json", record, exclusive=False)
                self._batch_records[id] = record
            return record

    def set_status(self, id: str, status: str, **values: JsonValue) -> JsonRecord:
        """Sets the batch's status, the time of the change and other values."""
        return self.update_batch(id, lambda record: {"status": status, f"{status}_at": int(time.time()), **values})


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def _by_age(records: Mapping[str, JsonRecord]) -> list[JsonRecord]:
    return sorted(records.values(), key=lambda record: (_int(record["created_at"]), str(record["id"])))


def _int(value: JsonValue) -> int:
    return value if isinstance(value, int) else 0


def _load_records(folder: Path, ids: re.Pattern[str], fields: Mapping[str, type]) -> dict[str, JsonRecord]:
    """Loads the records in `folder`; skips invalid ones with a warning."""
    records: dict[str, JsonRecord] = {}
    for path in folder.glob("*.json"):
        if not ids.fullmatch(path.stem):
            continue
        try:
            records[path.stem] = _read_record(path, fields)
        except (DamagedRunError, OSError, ValueError) as error:
            log.warning("%s is ignored: %s", path, error)
    return records


def _read_record(path: Path, fields: Mapping[str, type]) -> JsonRecord:
    """Reads a record. Raises ValueError if it is invalid or cannot be sent as JSON; DamagedRunError, OSError."""
    if not path.is_file() or path.stat().st_size > MAX_RECORD_BYTES:
        raise ValueError(f"not a regular file of up to {MAX_RECORD_BYTES // KIB} KiB")
    record = read_json(path)
    if record.get("id") != path.stem:
        raise ValueError("its id differs from the file name")
    if wrong := next((name for name, kind in fields.items() if type(record.get(name)) is not kind), None):
        raise ValueError(f"{wrong} is missing or has another type")
    if "endpoint" in fields:
        counts, metadata = record["request_counts"], record.get("metadata")
        if record["status"] not in STATUSES or record["endpoint"] not in URLS:
            raise ValueError("unknown status or endpoint")
        if not FILE_ID.fullmatch(str(record["input_file_id"])):
            raise ValueError("input_file_id is not a file id")
        if not isinstance(counts, dict) or any(type(count) is not int for count in counts.values()):
            raise ValueError("request_counts are not numbers")
        if metadata is not None and not isinstance(metadata, dict):
            raise ValueError("metadata is not an object")
    json.dumps(
        record, ensure_ascii=False, allow_nan=False
    ).encode()  # raises for a lone surrogate or an infinite number
    return record
