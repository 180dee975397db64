"""The probes of one kind of product by rows, from the smallest up to those that would take too long."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .timing import Probe, Timed


@dataclass(frozen=True, kw_only=True)
class Row:
    """`probes` by M. `end` says why larger ones of those that were asked for are missing; None: none is."""

    probes: dict[int, Probe]
    end: str | None

    def nearest(self, num_rows: int) -> Probe:
        """That of so many rows, or where those were too many of the most."""
        return self.probes[min(num_rows, max(self.probes))]


def row_of(
    name: str, rows: Sequence[int], probe: Callable[[int], tuple[Probe, Timed]], *, longest_seconds: float
) -> Row:
    """`probe` makes that of M rows, with what it reads. Behind the first product that takes more than
    `longest_seconds`, warm, no larger one is measured: it would be no faster."""
    probes: dict[int, Probe] = {}
    wanted = sorted(rows)
    for place, num_rows in enumerate(wanted):
        probes[num_rows], timed = probe(num_rows)
        seconds = timed.warm_seconds()
        if seconds > longest_seconds and wanted[place + 1 :]:
            missing = ", ".join(map(str, wanted[place + 1 :]))
            end = (
                f"{name}: M={num_rows} takes {seconds:.2g} s, more than {longest_seconds:.2g} s, and so M={missing} "
                f"is not measured and counts as fast as M={num_rows}; raise measure.seconds to measure it"
            )
            return Row(probes=probes, end=end)
    return Row(probes=probes, end=None)
