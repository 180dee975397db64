"""What was measured as a table, and as YAML of the `machine` group."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

from runtime.config.profiles import MeasuredRates
from runtime.measure.machine_cache import Host
from runtime.measure.timing import Figure

SPREAD = "spread: how far a round was from the median of the rounds, at most"


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a measurement is of, for whoever finds the file later."""

    command: str
    date: str
    host: Host
    versions: Mapping[str, str]
    device_choice: str  # machine.device
    seconds: float
    notes: Sequence[str]  # on what was not measured


def format_table(times: Sequence[Mapping[str, Figure]]) -> str:
    """A row for each figure; measured more than once, its values side by side and whether they agree."""
    head = ["", *(["measured", "spread"] * len(times)), "unit", *(["agree"] if len(times) > 1 else [])]
    lines = [head, *(_row(name, [figures[name] for figures in times]) for name in times[0])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    is_left = [column in (0, 1 + 2 * len(times)) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if left else f"{cell:>{width}}"
            for cell, width, left in zip(line, widths, is_left, strict=True)
        ).rstrip()
        for line in lines
    )


def agreement(times: Sequence[Mapping[str, Figure]]) -> str:
    """One line: of how many figures all measurements have a value in common, within the spreads that they state."""
    agreeing = [name for name in times[0] if _agree([figures[name] for figures in times])]
    return f"{len(agreeing)} of {len(times[0])} figures agree within their spreads"


def _row(name: str, figures: Sequence[Figure]) -> list[str]:
    cells = [cell for figure in figures for cell in (format_value(figure.value), f"{figure.spread:.0%}")]
    return [name, *cells, figures[0].unit, *([("yes" if _agree(figures) else "no")] if len(figures) > 1 else [])]


def _agree(figures: Sequence[Figure]) -> bool:
    return all(one.agrees_with(other) for one, other in combinations(figures, 2))


def format_value(value: float) -> str:
    """Three significant digits; a whole number from 100 up."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_yaml(name: str, source: Source, rates: MeasuredRates, figures: Mapping[str, Figure]) -> str:
    """A file of the `machine` group, called `name`. Every figure stands in a comment, with its spread."""
    host = source.host
    width = max(map(len, figures))
    comments = [
        f"Measured by: {source.command}",
        f"{source.date}, in {source.seconds:.0f} s, on {host.hostname}: {host.cpu}, {host.num_threads} threads; "
        f"device: {host.device}",
        ", ".join(f"{package} {version}" for package, version in source.versions.items()),
        "",
        f"Medians; {SPREAD}.",
        *(
            f"  {key:<{width}}  {format_value(f.value):>9} {f.unit:<11}  spread {f.spread:.0%}"
            for key, f in figures.items()
        ),
        *(f"Note: {note}" for note in source.notes),
    ]
    values = [f"name: {name}", f"device: {source.device_choice}", f"num_threads: {host.num_threads}", "sheet: null"]
    lines = [f"# {comment}".rstrip() for comment in comments] + values + ["rates:"]
    return "\n".join([*lines, *_block(asdict(rates), "  ")]) + "\n"


def _block(values: Mapping[str, object], indent: str) -> list[str]:
    lines: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:", *_block(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}")
    return lines


def _scalar(value: object) -> str:
    """Floats with a point and four significant digits, which YAML reads as floats."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, float):
        digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 1
        return f"{value:.{max(digits, 1)}f}"
    return str(value)
