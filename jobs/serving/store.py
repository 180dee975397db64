"""Files and batches as they lie on disk, so that they are there after a restart: a JSON record each, in the API's own
form, and what was uploaded.
"""

import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..files.publishing import JsonValue, make_directory, read_json, write_json

ID = re.compile(r"(file-|batch_)[0-9a-f]{24}(-output|-errors)?")
FINAL = frozenset({"completed", "failed", "cancelled"})

Record = dict[str, JsonValue]


class BatchStore:
    """`directory`: of this server's records. Every change is written whole; safe between threads."""

    def __init__(self, directory: Path):
        self._files = make_directory(directory / "files")
        self._batches = make_directory(directory / "batches")
        self._lock = threading.Lock()

    def content(self, id: str) -> Path:
        """Where the bytes of an uploaded file lie, or are to lie."""
        return self._files / f"{id}.jsonl"

    def log(self, batch_id: str) -> Path:
        """What the job of a batch says."""
        return self._batches / f"{batch_id}.log"

    def add_file(self, id: str, path: Path, filename: str, purpose: str) -> Record:
        record: Record = {
            "id": id,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "path": str(path.absolute()),
        }
        write_json(self._files / f"{id}.json", record, exclusive=False)
        return record

    def file(self, id: str) -> Record | None:
        return _read(self._files, id)

    def files(self) -> list[Record]:
        return _all(self._files)

    def add_batch(self, input_file_id: str, endpoint: str, window: str, metadata: JsonValue, total: int) -> Record:
        record: Record = {
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
        write_json(self._batches / f"{record['id']}.json", record, exclusive=True)
        return record

    def batch(self, id: str) -> Record | None:
        return _read(self._batches, id)

    def batches(self) -> list[Record]:
        """All of them, the oldest first."""
        return _all(self._batches)

    def change(self, id: str, changed: Callable[[Record], Mapping[str, JsonValue]]) -> Record:
        """The batch with what `changed` says of it as it is now, written."""
        with self._lock:
            record = read_json(self._batches / f"{id}.json")
            if found := changed(record):
                record |= found
                write_json(self._batches / f"{id}.json", record, exclusive=False)
            return record

    def enter(self, id: str, status: str, **more: JsonValue) -> Record:
        """The batch in another state, and since when."""
        return self.change(id, lambda record: {"status": status, f"{status}_at": int(time.time()), **more})


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def _read(folder: Path, id: str) -> Record | None:
    """The record; None where there is none of this id, or it is no id."""
    path = folder / f"{id}.json"
    return read_json(path) if ID.fullmatch(id) and path.is_file() else None


def _all(folder: Path) -> list[Record]:
    records = [read_json(path) for path in folder.glob("*.json") if ID.fullmatch(path.stem)]
    return sorted(records, key=lambda record: (str(record.get("created_at")), str(record["id"])))
