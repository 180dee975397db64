"""Settings that earlier versions had: what a command, a configuration or a run of theirs that names one is told.

Those that could change the text stand in the name and in the manifest of each run that was begun with them, so what
takes their place here stays for good.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it needs pyarrow, and measuring on a plain image does not
    from ..files.publishing import JsonValue


@dataclass(frozen=True, kw_only=True)
class GoneKey:
    """`value`: the one that meant what is done now; a run that was begun with it goes on. `now`: what that is."""

    value: "JsonValue"
    now: str


GONE_KEYS = {"model.products": GoneKey(value="exact", now="products are exact")}


def gone_values() -> "dict[str, JsonValue]":
    return {key: gone.value for key, gone in GONE_KEYS.items()}
