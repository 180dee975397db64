"""A strict JSON parser for rows. Rejects NaN, infinities, duplicate keys and deep nesting.

So every value can be written as JSON again, and all JSON parsers read the same value.
"""

import json
from typing import TypeAlias

from runtime.store.json_object import is_deeper_than

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_DEPTH = 100
MAX_SHOWN = 60  # characters of a quoted text
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"


def parse_json(text: str) -> Json:
    """Parses JSON text. Raises ValueError with the reason."""
    try:
        value = DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if is_deeper_than(value, MAX_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value


def shorten(text: str, limit: int = MAX_SHOWN) -> str:
    """Quotes a text for a message: in quotes, in ASCII with escapes, and truncated to `limit` characters."""
    return ascii(text if len(text) <= limit else f"{text[:limit]}...")


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        repeated_key = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"duplicate key {shorten(repeated_key)} in an object")
    return fields


def _refuse_constant(text: str) -> Json:
    raise ValueError(f"{text} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {shorten(text)} is out of range")
    return value


DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float
)  # shared, because `json.loads` with hooks makes a decoder in each call
