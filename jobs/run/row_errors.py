"""Why rows of a run have an error: for who started it and has not opened its files yet. It stands alone as the summary
is made of counts, and this of the rows themselves.
"""

import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from ..record.part_files import visible
from .generation import Outcome
from .summary_table import format_table

MOST_REASONS = 3
NUMBER = re.compile(r"\d[\d,.]*")


def told_outcome(outcome: Outcome) -> str:
    """The table of a run's summary, and below it why rows have an error, where any has."""
    table = format_table(outcome.summary)
    return f"{table}\n\n{reasons(outcome.directory)}" if outcome.summary.rows["error"] else table


def reasons(directory: Path) -> str:
    """The commonest errors of a run's rows, a line each. Those that differ by numbers alone count as one, of which the
    first is told."""
    counts, firsts = Counter[str](), dict[str, str]()
    for path in visible(directory / "generations"):
        for error in pq.read_table(path, columns=["error"])["error"].drop_null().to_pylist():
            kind = NUMBER.sub("0", error)
            counts[kind] += 1
            firsts.setdefault(kind, error)
    lines = [f"{count:>8,} x {firsts[kind]}" for kind, count in counts.most_common(MOST_REASONS)]
    others = [f"and {len(counts) - len(lines)} other reasons"] if len(counts) > len(lines) else []
    return "\n".join(["rows with an error, by their column `error`:", *lines, *others])
