"""Kinds of values: what the types of columns follow from, noted down value by value without keeping any."""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

INT64_RANGE = range(-(2**63), 2**63)
EXACT_FLOAT_RANGE = range(-(2**53), 2**53 + 1)  # integers that a float64 holds exactly

ColumnKinds: TypeAlias = dict[str, set[str]]  # by column, in the order in which they were met first


def add_kinds(kinds: ColumnKinds, rows: Iterable[Mapping[str, object]]) -> None:
    """Notes down what kinds of values the columns of these rows have. Null has none."""
    for row in rows:
        for name, value in row.items():
            known = kinds.get(name)
            if known is None:
                known = kinds[name] = set()
            if type(value) is str:  # nearly always
                known.add("string")
            elif value is not None:
                known.add(_kind(value))


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if value in EXACT_FLOAT_RANGE else "wide int" if value in INT64_RANGE else "other"
    return "float" if isinstance(value, float) else "string" if isinstance(value, str) else "other"
