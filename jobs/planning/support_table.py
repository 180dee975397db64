"""The support table of `jobs.models`: which families, and how their rows become text."""

from collections.abc import Sequence

from jobs.planning.support import FamilyTraits
from runtime.errors import ConfigError
from runtime.model.families import FAMILIES, Family

from ..config.settings import TableFormat

_HEAD = ("family", "model_type", "lanes", "experts", "cache", "tested")
_TESTED = "greedy, sampled"
_FOOT = "Tested: equals transformers' generate, token for token, in every tier (tests/runtime/test_families.py)."


def families_named(part: str | None) -> list[Family]:
    """Those with `part` in their name or model type, in the order of the table; all for None. ConfigError for none."""
    chosen = [family for family in FAMILIES.values() if part is None or part in f"{family.name} {family.model_type}"]
    if not chosen:
        types = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES.values()))
        raise ConfigError(f"family={part} is in no family's name or model_type; the types are {types}")
    return chosen


def support_table(rows: Sequence[FamilyTraits], shape: TableFormat) -> str:
    cells = [_HEAD, *(_cells(row) for row in rows)]
    if shape is TableFormat.markdown:
        cells.insert(1, ("---",) * len(_HEAD))
        lines = [f"| {' | '.join(line)} |" for line in cells]
    else:
        widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
    return "\n".join([*lines, "", _FOOT])


def _cells(row: FamilyTraits) -> tuple[str, ...]:
    if row.lanes is None or row.experts is None or row.cache is None:
        return (row.name, row.model_type, row.note, "", "", "no")
    lanes = f"{row.lanes.value}: {row.note}" if row.note else row.lanes.value
    return (row.name, row.model_type, lanes, row.experts.value, row.cache.value, _TESTED)
