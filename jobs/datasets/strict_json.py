"""JSON of rows: stricter than Python's (no NaN, no infinities, no duplicate keys, bounded nesting), so that what is
read can be written again and does not depend on who parses it.
"""

import json
from typing import TypeAlias

from runtime.store.json_object import is_deeper_than

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_DEPTH = 100
MAX_SHOWN = 60  # characters of a text, in a message
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"


def parse_json(text: str) -> Json:
    """The value of a JSON text. Raises ValueError saying what is wrong with it."""
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
    """`text` quoted for a message: control characters escaped, at most `limit` characters of it."""
    return ascii(text if len(text) <= limit else f"{text[:limit]}...")


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shorten(twice)} occurs twice in one object")
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
)  # `json.loads` would make one for each text
