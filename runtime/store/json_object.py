"""Reads untrusted JSON objects, bounded in size and depth."""

import json
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from ..errors import CheckpointError
from ..units import MIB, format_bytes
from .read_errors import open_files_hint

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
JsonObject: TypeAlias = Mapping[str, JsonValue]

MAX_DEPTH = 64
MAX_JSON_BYTES = 64 * MIB  # the largest tokenizer.json in use has about 32 MiB
TYPE_NAMES = {type(None): "null", bool: "true or false", str: "text", list: "a list", dict: "an object"}


def read_json_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> JsonObject:
    """Reads a JSON object. Raises CheckpointError, or FileNotFoundError if there is no file.

    Accepts infinities, which transformers writes (`time_step_limit` of Mamba-2), but not NaN.
    """

    def parse_constant(text: str) -> float:
        if text == "NaN":
            raise ValueError("NaN is not allowed")
        return float(text)

    try:
        num_bytes = require_regular(path)
        if num_bytes > max_bytes:
            raise CheckpointError(f"{path}: {format_bytes(num_bytes)} of JSON; limit: {format_bytes(max_bytes)}")
        value = json.loads(path.read_bytes().decode("utf-8"), parse_constant=parse_constant)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}{open_files_hint(error)}") from error
    except RecursionError:
        raise CheckpointError(f"{path}: nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # includes UnicodeDecodeError and JSONDecodeError
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, but holds {type_name(value)}")
    if is_deeper_than(value, MAX_DEPTH):
        raise CheckpointError(f"{path}: nested deeper than {MAX_DEPTH} levels")
    return cast(JsonObject, value)


def type_name(value: object) -> str:
    """Returns the name of a JSON value's type for messages."""
    return TYPE_NAMES.get(type(value), "a number")


def require_regular(path: Path) -> int:
    """Returns the file's size in bytes. Raises CheckpointError for a device or pipe, since reading it may never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: cannot be read: not a regular file")
    return status.st_size


def is_deeper_than(value: object, limit: int) -> bool:
    """True if lists and objects are nested deeper than `limit`."""
    level = [value]  # breadth-first: recursion could overflow the stack
    for _ in range(limit + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    return True
