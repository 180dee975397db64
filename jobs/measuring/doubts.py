"""What speaks against a measurement: figures far from those that were kept before, or from the device's data sheet."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.config.profiles import DataSheet, MeasuredRates
from runtime.measure.machine_cache import Host

from ..config.settings import read_yaml
from ..config.typed import build
from .report import format_value

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
