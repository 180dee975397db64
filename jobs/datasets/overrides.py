"""What a record asks otherwise than the run: the columns that `dataset.*_field` names, read strictly.

A column that is absent, null or empty text (which is what a CSV file has for nothing) leaves the run's own setting.
Numbers may be text, as all of a CSV file is; a whole number may be stored as 12.0, as pandas does beside a null.
"""

import math
from typing import Any

from runtime.config import SamplingOverrides

from .config import OVERRIDE_FIELDS, DatasetConfig
from .records import TYPE_NAMES, BadRecord, Fields, Json, check_text, shorten

AS_THE_RUN = SamplingOverrides()


def read_overrides(fields: Fields, config: DatasetConfig) -> SamplingOverrides:
    """Raises BadRecord naming the column and its key."""
    given: dict[str, Any] = {}
    for key, read in zip(OVERRIDE_FIELDS, (_whole_number, _number, _texts), strict=True):
        name: str = getattr(config, key) or ""
        value = fields.get(name) if name else None
        if value is not None and value != "":
            given[key.removesuffix("_field")] = read(value, f"the field {shorten(name)} (dataset.{key})")
    return SamplingOverrides(**given) if given else AS_THE_RUN


def _whole_number(value: Json, what: str) -> int:
    number = _number(value, what)
    if number != int(number):
        raise BadRecord(f"{what} is {number}, not a whole number")
    return int(number)


def _number(value: Json, what: str) -> float:
    """0 or above, and finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadRecord(f"{what} is {TYPE_NAMES[type(value)]}, not a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise BadRecord(f"{what} is {shorten(str(value))}, not a number") from None
    if not (math.isfinite(number) and number >= 0):
        raise BadRecord(f"{what} must be 0 or more, got {number}")
    return number


def _texts(value: Json, what: str) -> list[str]:
    """One stop string or a list of them."""
    items = value if isinstance(value, list) else [value]
    return [check_text(item, f"a stop string of {what}") for item in items]
