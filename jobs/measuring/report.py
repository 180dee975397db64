"""Formats a measurement as a table, and as a YAML file of the `machine` group.

Also finds measured numbers that differ much from an earlier measurement, or from the data sheet of the device.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations
from pathlib import Path

from runtime.config.profiles import BackendTable, DataSheet, MeasuredRates
from runtime.measure.machine_cache import Host
from runtime.measure.timing import Figure

from ..config.settings import read_yaml
from ..config.typed import build

SPREAD = "spread: the largest deviation of a round from the median"
MAX_RATIO = 3.0  # more than versions of torch, clock rates and other load explain; wrong measurements often exceed it
MIN_TURN_SECONDS = 1e-5  # a shorter turn (one micro-batch in one layer) is mostly overhead of the clock
MACHINES = Path(__file__).resolve().parents[2] / "conf" / "machine"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of `jobs.measure`. `figures`: measured numbers with spread and unit, by name."""

    host: Host
    rates: MeasuredRates
    figures: Mapping[str, Figure]
    products: BackendTable | None  # the fastest linear backends; None if an accelerator computes
    seconds: float  # duration of the measurement
    notes: Sequence[str]  # what was not measured, and why

    def to_yaml(self, name: str, *, command: str, date: str, versions: Mapping[str, str], device_choice: str) -> str:
        """The text of a YAML file of the `machine` group, with figures and spreads as comments. `device_choice`: the
        value of `machine.device`."""
        host, figures = self.host, self.figures
        width = max(map(len, figures))
        comments = [
            f"Measured by: {command}",
            f"{date}, in {self.seconds:.0f} s, on {host.hostname}: {host.cpu}, {host.num_threads} threads; "
            f"device: {host.device}",
            ", ".join(f"{package} {version}" for package, version in versions.items()),
            "",
            f"Medians; {SPREAD}.",
            *(
                f"  {key:<{width}}  {format_value(f.value):>9} {f.unit:<11}  spread {f.spread:.0%}"
                for key, f in figures.items()
            ),
            *(f"Note: {note}" for note in self.notes),
        ]
        values = [f"name: {name}", f"device: {device_choice}", f"num_threads: {host.num_threads}", "sheet: null"]
        lines = [f"# {comment}".rstrip() for comment in comments] + values + ["rates:"]
        return "\n".join([*lines, *_block(asdict(self.rates), "  ")]) + "\n"


def format_table(times: Sequence[Mapping[str, Figure]]) -> str:
    """Formats a row for each figure. Several measurements have a column each, and a column says if they agree. A figure
    that a measurement lacks is not compared. `times`: the figures of each measurement, by name."""
    head = ["", *(["measured", "spread"] * len(times)), "unit", *(["agree"] if len(times) > 1 else [])]
    lines = [head]
    for name in dict.fromkeys(name for figures in times for name in figures):
        row = [figures.get(name) for figures in times]
        measured = [figure for figure in row if figure is not None]
        values = [
            ("-", "-") if figure is None else (format_value(figure.value), f"{figure.spread:.0%}") for figure in row
        ]
        agree = "-" if len(measured) < len(row) else "yes" if _agree(measured) else "no"
        lines.append([name, *chain(*values), measured[0].unit, *([agree] if len(times) > 1 else [])])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    is_left = [column in (0, 1 + 2 * len(times)) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if left else f"{cell:>{width}}"
            for cell, width, left in zip(line, widths, is_left, strict=True)
        ).rstrip()
        for line in lines
    )


def format_agreement(times: Sequence[Mapping[str, Figure]]) -> str:
    """Formats the number of figures that agree in all measurements. `times`: as in `format_table`."""
    names = [name for name in times[0] if all(name in figures for figures in times)]
    num_agreeing = sum(_agree([figures[name] for figures in times]) for name in names)
    return f"{num_agreeing} of {len(names)} figures agree within their spreads"


def _agree(figures: Sequence[Figure]) -> bool:
    return all(one.agrees_with(other) for one, other in combinations(figures, 2))


def format_value(value: float) -> str:
    """Formats a number with three significant digits, and from 100 on without decimals."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _block(values: Mapping[str, object], indent: str) -> list[str]:
    """The lines of a YAML mapping."""
    lines: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:", *_block(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}")
    return lines


def _scalar(value: object) -> str:
    """Formats a YAML value. Floats have a decimal point and four significant digits."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, float):
        digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 1
        return f"{value:.{max(digits, 1)}f}"
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Value:
    """A number with its unit."""

    number: float
    unit: str

    def __str__(self) -> str:
        return f"{format_value(self.number)} {self.unit}"


def find_suspicious_rates(rates: MeasuredRates, before: MeasuredRates | None, host: Host) -> list[str]:
    """Returns a warning for each rate that differs by more than a factor of `MAX_RATIO` from `before`, the stored rates
    of this host, or from the data sheet of the device."""
    measured, stored = _list_values(rates), _list_values(before) if before else {}
    warnings = list(_find_outliers(measured, stored, "in the stored measurement"))
    for path in sorted(MACHINES.glob("*.yaml")):
        values = read_yaml(path).get("sheet")
        if not isinstance(values, dict) or not matches_device(path.stem, host.device):
            continue
        sheet = build(DataSheet, values, f"{path.stem}.sheet.")
        if sheet.num_devices > 1:
            continue
        # Only figures of the device are compared, as hosts differ. Matrix products are fastest with the most rows.
        link, num_rows = Value(number=sheet.host_link_gb_per_second, unit="GB/s"), rates.gemm_rows[-1]
        peaks = {"memory_gb_per_second": Value(number=sheet.memory_gb_per_second, unit="GB/s")}
        peaks |= {"link_in_gb_per_second": link, "link_out_gb_per_second": link}
        tflops = {"float32": sheet.float32_tflops, "float16": sheet.float16_tflops, "bfloat16": sheet.bfloat16_tflops}
        for dtype, peak in tflops.items():
            if peak is not None:
                peaks[f"{dtype}.gemm_gflops (M={num_rows})"] = Value(number=1e3 * peak, unit="GFLOP/s")
        warnings += _find_outliers(measured, peaks, f"on the data sheet, machine={path.stem}")
    return warnings


def matches_device(profile: str, device: str) -> bool:
    """True if the name of a profile, such as a100-40, is that of a device, such as "NVIDIA A100-SXM4-40GB". A device
    with a suffix such as Ti or Super is another one."""
    # Each part of the profile's name must occur as a word, with an optional space before digits and "gb" after it.
    parts = [re.sub(r"(?<=[a-z])(?=\d)", " ?", part) for part in profile.split("-")]
    pattern = r".*\b".join(f"{part}(gb)?\\b" for part in parts)
    return re.search(rf"\b{pattern}(?! (ti|super|laptop|d)\b)", re.sub(r"[^a-z0-9]+", " ", device.lower())) is not None


def _find_outliers(measured: Mapping[str, Value], others: Mapping[str, Value], where: str) -> Iterator[str]:
    """Yields a warning for each rate that differs much from `others`. Of matrix products that differ only in the number
    of rows, only for the one that differs most."""
    farthest: dict[str, tuple[float, str]] = {}
    for name in measured.keys() & others.keys():
        value, other = measured[name], others[name]
        ratio = max(value.number / other.number, other.number / value.number)
        if ratio > MAX_RATIO:
            warning = (
                f"machine.rates.{name} is {value}, but {other} {where}: a factor of {format_value(ratio)}. Measure "
                "again on an idle machine before planning with it: python -m jobs.measure"
            )
            key = name.partition(" ")[0]
            farthest[key] = max(farthest.get(key, (0.0, "")), (ratio, warning))
    yield from (farthest[key][1] for key in sorted(farthest))


def _list_values(rates: MeasuredRates) -> dict[str, Value]:
    speeds = {
        "disk_gb_per_second": rates.disk_gb_per_second,
        "memory_gb_per_second": rates.memory_gb_per_second,
        "link_in_gb_per_second": rates.link_in_gb_per_second,
        "link_out_gb_per_second": rates.link_out_gb_per_second,
    }
    values = {key: Value(number=number, unit="GB/s") for key, number in speeds.items() if number is not None}
    if rates.turn_seconds >= MIN_TURN_SECONDS:
        values["turn_seconds"] = Value(number=rates.turn_seconds, unit="s")
    for name, dtype in rates.dtypes.items():
        for num_rows, gflops in zip(rates.gemm_rows, dtype.gemm_gflops, strict=False):
            values[f"{name}.gemm_gflops (M={num_rows})"] = Value(number=gflops, unit="GFLOP/s")
        for key in ("attention_gb_per_second", "cpu_attention_gb_per_second"):
            values[f"{name}.{key}"] = Value(number=getattr(dtype, key), unit="GB/s")
        values[f"{name}.prefill_attention_gflops"] = Value(number=dtype.prefill_attention_gflops, unit="GFLOP/s")
    return values
