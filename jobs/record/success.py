"""_SUCCESS.json, which marks a finished run. It has the SHA-256 of each part, and number formats of weights and KV."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.errors import DamagedRunError

from ..files.publishing import JsonValue, file_sha256, json_digest, read_json, write_json
from .part_files import visible_files
from .run_dir import RunDirectory

LOG = logging.getLogger(__name__)


def write_success(
    directory: RunDirectory,
    config: str,
    rows: Mapping[str, int],
    parts: Sequence[Mapping[str, JsonValue]],
    numbers: Mapping[str, JsonValue] | None,
) -> None:
    """Writes _SUCCESS.json. `config`: digest of the manifest. `rows`: number of rows by status. `parts`: an object for
    each part, with `file`, `block`, `num_rows` and `sha256`. `numbers`: number formats, as in
    `ResolvedSettings.numbers`; None if nothing was computed. Raises OutputError."""
    value: dict[str, JsonValue] = {"config": config, "rows": {**rows}, "numbers": numbers, "parts": parts}
    write_json(directory.success, value | {"digest": json_digest(value)}, exclusive=False)


def recorded_parts(directory: RunDirectory) -> Mapping[str, str] | None:
    """The SHA-256 of each part by file name. None if _SUCCESS.json is missing or damaged. Raises OSError."""
    return _read_listed_parts(directory.success) if directory.success.exists() else None


def _read_listed_parts(path: Path) -> Mapping[str, str] | None:
    try:
        value = read_json(path)
    except DamagedRunError as error:
        LOG.warning("%s", error)
        return None
    digest, parts = value.pop("digest", None), value.get("parts")
    if not isinstance(parts, list) or digest != json_digest(value):
        LOG.warning("%s was changed after it was written and is ignored", path)
        return None
    return {str(part.get("file")): str(part.get("sha256")) for part in parts if isinstance(part, dict)}


def is_finished(directory: RunDirectory) -> bool:
    """True if the files of parts are exactly those in `_SUCCESS.json`, by name and SHA-256."""
    try:
        recorded = recorded_parts(directory)
        # A symbolic link does not count: its target is no file of the run.
        digests = {
            path.name: file_sha256(path) if path.is_file() and not path.is_symlink() else None
            for path in visible_files(directory.generations)
        }
        return recorded is not None and digests == recorded
    except OSError:
        return False


def log_regenerated_parts(directory: RunDirectory, parts: Mapping[str, str]) -> None:
    """Logs whether parts that were generated again equal those in an earlier `_SUCCESS.json`, which is in quarantine.
    `parts`: SHA-256 by name. Raises OSError."""
    earlier = sorted(directory.quarantine.glob(f"*{directory.success.name}.*"), key=lambda path: int(path.suffix[1:]))
    listed = _read_listed_parts(earlier[-1]) if earlier else None
    if listed is None:
        return
    changed = [name for name, sha256 in parts.items() if listed.get(name, sha256) != sha256]
    if changed:
        LOG.warning("regenerated parts differ from those listed in %s: %s", earlier[-1], ", ".join(changed))
    else:
        LOG.info("regenerated parts are byte for byte those listed in %s", earlier[-1])
