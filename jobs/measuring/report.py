"""What was measured as a table, and as YAML of the `machine` group; and what speaks against it: figures far from those
that were kept before, or from the device's data sheet.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

from runtime.config.profiles import DataSheet, MeasuredRates
from runtime.measure.machine_cache import Host
from runtime.measure.timing import Figure

from ..config.settings import read_yaml
from ..config.typed import build

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


FAR = 3.0  # times: other torches, clocks and neighbours explain less, a slip in measuring often more
SHORTEST_SECONDS = 1e-5  # of a turn: shorter ones differ by what starts and stops a clock
MACHINES = Path(__file__).resolve().parents[2] / "conf" / "machine"


@dataclass(frozen=True, kw_only=True)
class Value:
    number: float
    unit: str

    def __str__(self) -> str:
        return f"{format_value(self.number)} {self.unit}"


def doubts(rates: MeasuredRates, before: MeasuredRates | None, host: Host) -> list[str]:
    """A sentence for each key whose value is `FAR` times that of `before`, or of the data sheet of the host's device,
    or the other way round. `before`: what was kept of this host, if anything was."""
    found = _values(rates)
    sentences = list(_far(found, _values(before), "in the measurement that was kept before")) if before else []
    for name, sheet in _sheets().items():
        if names(name, host.device):
            sentences += _far(found, _peaks(sheet, rates), f"on the data sheet, machine={name}")
    return sentences


def names(profile: str, device: str) -> bool:
    """Whether a profile of the machine group is of the device with this name: a100-40 of "NVIDIA A100-SXM4-40GB". A
    card of the same number with a word behind it is another one."""
    parts = [re.sub(r"(?<=[a-z])(?=\d)", " ?", part) for part in profile.split("-")]
    pattern = r".*\b".join(f"{part}(gb)?\\b" for part in parts)
    return re.search(rf"\b{pattern}(?! (ti|super|laptop|d)\b)", re.sub(r"[^a-z0-9]+", " ", device.lower())) is not None


def _far(found: Mapping[str, Value], others: Mapping[str, Value], where: str) -> Iterator[str]:
    """The farthest alone of products by rows, which share a key."""
    farthest: dict[str, tuple[float, str]] = {}
    for name in found.keys() & others.keys():
        one, other = found[name], others[name]
        ratio = max(one.number / other.number, other.number / one.number)
        if ratio > FAR:
            sentence = (
                f"machine.rates.{name} is {one}, and {other} {where}: {format_value(ratio)} times as much or "
                "as little. Measure again on an idle machine before planning by it: python -m jobs.measure"
            )
            key = name.partition(" ")[0]
            farthest[key] = max(farthest.get(key, (0.0, "")), (ratio, sentence))
    yield from (farthest[key][1] for key in sorted(farthest))


def _values(rates: MeasuredRates) -> dict[str, Value]:
    speeds = {
        "disk_gb_per_second": rates.disk_gb_per_second,
        "memory_gb_per_second": rates.memory_gb_per_second,
        "link_in_gb_per_second": rates.link_in_gb_per_second,
        "link_out_gb_per_second": rates.link_out_gb_per_second,
    }
    found = {key: Value(number=number, unit="GB/s") for key, number in speeds.items() if number is not None}
    if rates.turn_seconds >= SHORTEST_SECONDS:
        found["turn_seconds"] = Value(number=rates.turn_seconds, unit="s")
    for dtype, each in rates.dtypes.items():
        for num_rows, gflops in zip(rates.gemm_rows, each.gemm_gflops, strict=False):
            found[f"{dtype}.gemm_gflops (M={num_rows})"] = Value(number=gflops, unit="GFLOP/s")
        for key in ("attention_gb_per_second", "cpu_attention_gb_per_second"):
            found[f"{dtype}.{key}"] = Value(number=getattr(each, key), unit="GB/s")
        found[f"{dtype}.prefill_attention_gflops"] = Value(number=each.prefill_attention_gflops, unit="GFLOP/s")
    return found


def _peaks(sheet: DataSheet, rates: MeasuredRates) -> dict[str, Value]:
    """What is odd beside the data sheet, of the device alone: the host around it is another one. Products reach them
    with the most rows."""
    found = {"memory_gb_per_second": Value(number=sheet.memory_gb_per_second, unit="GB/s")}
    for key in ("link_in_gb_per_second", "link_out_gb_per_second"):
        found[key] = Value(number=sheet.host_link_gb_per_second, unit="GB/s")
    tflops = {"float32": sheet.float32_tflops, "float16": sheet.float16_tflops, "bfloat16": sheet.bfloat16_tflops}
    for dtype, peak in tflops.items():
        if peak is not None:
            found[f"{dtype}.gemm_gflops (M={rates.gemm_rows[-1]})"] = Value(number=1e3 * peak, unit="GFLOP/s")
    return found


def _sheets() -> dict[str, DataSheet]:
    """The sheets of one device each, by profile."""
    found: dict[str, DataSheet] = {}
    for path in sorted(MACHINES.glob("*.yaml")):
        values = read_yaml(path).get("sheet")
        if isinstance(values, dict):
            sheet = build(DataSheet, values, f"{path.stem}.sheet.")
            if sheet.num_devices == 1:
                found[path.stem] = sheet
    return found
