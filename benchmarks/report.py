"""Tables and pictures of measurements: medians, spread, ratios, equal tokens, and the machine."""

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from operator import eq
from pathlib import Path
from statistics import median

import torch

from runtime.measure.bandwidth import LINK_IN
from runtime.units import GIB, format_bytes

from .contenders import CONTENDERS, AttentionBaseline, Contender, KVAccess, Peer
from .gpu.device import format_link
from .gpu.task import GpuMachine, VariantMeasurement, VariantPhaseTimes
from .instruction_sets import Isa
from .task import Result

LINK_BYTES_PER_SECOND = 16e9  # a link between host and GPU: PCIe 4.0 x8, or 3.0 x16
BAR_PIXELS, FRAME_PIXELS = 34, 110
WEIGHTSTREAM_COLOR, PEER_COLOR = "#4c78a8", "#bab0ac"
GPU_REFERENCE = "accelerate cpu_offload"  # ratios are relative to it, or to the first variant without it

Rounds = Mapping[str, Sequence[Result]]


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines).replace(" --- ", "---")  # |---|---|


def speed_table(rounds: Rounds) -> str:
    """A row for each contender. `batch`: a peer's batch size. `ratio`: relative to the median of the first contender.
    `equal`: the sequences with the same tokens as for transformers, or as for the first contender without it."""
    first = next(iter(rounds.values()))
    base = median(result.rate for result in first)
    reference = rounds.get("transformers", first)[0].tokens
    headings = ["contender", "batch", "rate, median (min-max)", "ratio", "peak memory above baseline", "read per run"]
    rows = []
    for name, results in rounds.items():
        tokens, rates = results[0].tokens, [result.rate for result in results]
        numbers = (median(rates), min(rates), max(rates))
        middle, low, high = (f"{rate:.1f} tok/s" if tokens else f"{rate / 1e9:.2f} GB/s" for rate in numbers)
        peak = median(result.peak_bytes - result.baseline_bytes for result in results)
        num_equal = sum(ours == theirs for ours, theirs in zip(tokens, reference, strict=False))
        rows.append(
            [
                name,
                results[0].batch_size or "-",
                f"{middle} ({low}-{high})",
                f"{median(rates) / base:.2f}",
                format_bytes(peak),
                format_bytes(median(result.bytes_read for result in results)),
                f"{num_equal} of {len(reference)}" if tokens else "-",
            ]
        )
    return table([*headings, "equal"], rows) + _attention_table(rounds)


def _attention_table(rounds: Rounds) -> str:
    """The measured time of attention over KV in host memory, and the computed time to copy the same KV over a link."""
    from .reading import layer_bytes  # imports the attention kernels

    rows = []
    for contender, entry in CONTENDERS.items():
        if isinstance(entry, AttentionBaseline) and entry.access is not KVAccess.read and contender.value in rounds:
            rate, num_bytes = median(result.rate for result in rounds[contender.value]), layer_bytes(entry.dtype)
            rows.append(
                [
                    contender.value,
                    format_bytes(num_bytes),
                    f"{num_bytes / rate * 1e3:.1f} ms",
                    f"{num_bytes / LINK_BYTES_PER_SECOND * 1e3:.1f} ms",
                    f"{rate / LINK_BYTES_PER_SECOND:.2f}",
                ]
            )
    headings = ["one layer's KV", "its bytes", "attention, measured", "copy over 16 GB/s, computed", "times faster"]
    return "\n\n" + table(headings, rows) if rows else ""


def gpu_table(machine: GpuMachine, measurements: Sequence[VariantMeasurement], device_memory_gib: float) -> str:
    """A table with a row for each variant, and one with the phases of Weightstream's variants. Weightstream counts the
    bytes that it copies to the device. For peers, they are computed: all offloaded weights once per forward."""
    rounds: dict[str, list[VariantMeasurement]] = {}
    for measurement in measurements:
        if measurement.result is not None:
            rounds.setdefault(measurement.variant, []).append(measurement)
    base = _rate(rounds[GPU_REFERENCE if GPU_REFERENCE in rounds else next(iter(rounds))]) if rounds else 0.0
    headings = ["variant", "layers", "sequences", "tokens/s, median (min-max)", "ratio", "prefill", "decode"]
    headings += ["device memory", "to the device", "share of link bandwidth", "equal"]
    phases = [row for name, measured in rounds.items() for row in _phase_rows(name, [m.phases for m in measured])]
    parts = [
        f"{machine.device}, limited to {device_memory_gib:g} GiB of its memory; {machine.num_layers} layers of "
        f"{machine.model}, {format_bytes(machine.weight_bytes)} of random bf16 in host memory.\n"
        f"{format_link(machine.link)}",
        table(headings, [[*_gpu_row(each, base, machine), _count_equal(each[0], rounds)] for each in rounds.values()]),
        *([table(PHASE_HEADINGS, phases)] if phases else []),
        *(f"{each.variant} cannot run here: {each.refusal}" for each in measurements if each.refusal),
    ]
    return "\n\n".join(parts)


def _gpu_row(measured: Sequence[VariantMeasurement], base: float, machine: GpuMachine) -> list[object]:
    results, first = _results(measured), measured[0]
    rates = [result.rate for result in results]
    decode = median(result.seconds - result.prefill_seconds for result in results)
    copied = median(result.bytes_copied for result in results)
    rate = median(result.bytes_copied / result.seconds for result in results)
    share = rate / (machine.link[LINK_IN] * 1e9) if copied and machine.link else 0.0
    peak = max(result.peak_device_bytes for result in results)
    return [
        first.variant,
        first.num_layers,
        first.num_sequences,
        f"{median(rates):.1f} ({min(rates):.1f}-{max(rates):.1f})",
        f"{median(rates) / base:.2f}",
        f"{median(result.prefill_seconds for result in results):.2f} s",
        f"{decode:.2f} s",
        format_bytes(peak) if peak else "-",
        format_bytes(copied) if copied else "-",
        f"{share:.0%}" if share else "-",
    ]


def _count_equal(measured: VariantMeasurement, rounds: Mapping[str, Sequence[VariantMeasurement]]) -> str:
    """Counts the sequences with the same tokens as for the first variant that has as many layers and unrounded weights;
    `-` for rounded weights. In bf16, products of other shapes round differently, and one different token changes all
    tokens after it."""
    if measured.is_rounded:
        return "-"
    exact = (each[0] for each in rounds.values() if not each[0].is_rounded)
    reference = next(each for each in exact if each.num_layers == measured.num_layers)
    (ours,), (theirs,) = _results([measured]), _results([reference])
    return f"{sum(map(eq, ours.tokens, theirs.tokens))} of {min(len(ours.tokens), len(theirs.tokens))}"


def _results(measured: Sequence[VariantMeasurement]) -> list[Result]:
    return [each.result for each in measured if each.result is not None]


def _rate(measured: Sequence[VariantMeasurement]) -> float:
    return median(result.rate for result in _results(measured))


PHASE_HEADINGS = (
    "variant", "passes", "seconds", "tokens/s", "link busy", "to the device", "disk busy", "read",
    "compute waits for bytes",
)  # fmt: skip


def _phase_rows(name: str, rounds: Sequence[Sequence[VariantPhaseTimes]]) -> list[list[object]]:
    """A row for each phase, all cells from the round with the median seconds."""
    phases: dict[str, list[VariantPhaseTimes]] = {}
    for each in chain.from_iterable(rounds):
        phases.setdefault(each.phase, []).append(each)
    rows = []
    for times in phases.values():
        middle = median(each.seconds for each in times)
        rows.append(_phase_row(name, min(times, key=lambda each: abs(each.seconds - middle))))
    return rows


def _phase_row(name: str, times: VariantPhaseTimes) -> list[object]:
    copied, read = (format_bytes(num) if num else "-" for num in (times.bytes_copied, times.bytes_read))
    return [
        name,
        f"{times.num_passes} {times.phase}",
        f"{times.seconds:.2f}",
        f"{times.num_tokens / times.seconds:.1f}",
        f"{times.copy_seconds / times.seconds:.0%}",
        copied,
        f"{times.read_seconds / times.seconds:.0%}",
        read,
        f"{times.stall_seconds / times.seconds:.0%}",
    ]


def round_rows(rounds: Rounds) -> list[dict[str, object]]:
    """A row for each measurement, with the number of tokens instead of the tokens."""
    return [
        {"measured": name, "round": number, **asdict(result), "tokens": sum(map(len, result.tokens))}
        for name, results in rounds.items()
        for number, result in enumerate(results, start=1)
    ]


def draw_rates(path: Path, rates: Mapping[str, Sequence[float]], peers: Sequence[str], title: str, unit: str) -> None:
    """Writes a bar chart of rates with their spread, as svg or png by the suffix of `path`. Bars of `peers` are gray.
    Raises OutputError."""
    from jobs.pictures.figure import figure  # matplotlib, an optional dependency

    names = sorted(rates, key=lambda name: median(rates[name]))
    middles = [median(rates[name]) for name in names]
    below = [middle - min(rates[name]) for name, middle in zip(names, middles, strict=True)]
    above = [max(rates[name]) - middle for name, middle in zip(names, middles, strict=True)]
    with figure(path, FRAME_PIXELS + BAR_PIXELS * len(names)) as picture:
        axes = picture.subplots()
        colors = [PEER_COLOR if name in peers else WEIGHTSTREAM_COLOR for name in names]
        bars = axes.barh(names, middles, xerr=[below, above], color=colors, ecolor="#444444", capsize=2)
        axes.bar_label(bars, [f"{middle:,.4g}" for middle in middles], padding=6)
        axes.set_xlim(0, 1.12 * max(map(max, rates.values())))
        axes.set_xlabel(unit)
        axes.set_title(title, loc="left", fontsize=10)
        picture.tight_layout()


def format_provenance(num_rounds: int, command: str) -> str:
    """The line below a table: rounds, command, hardware and commit."""
    return f"{num_rounds} alternating rounds; `{command}`; {hardware()}; commit {commit()}."


def format_restriction(machine: str, isa: Isa, contenders: Sequence[Contender]) -> str:
    """The first line of a table with a limited instruction set: the processor, and how each contender is limited."""
    peers = [entry for entry in map(CONTENDERS.__getitem__, contenders) if isinstance(entry, Peer)]
    restrictions = dict.fromkeys(
        peer.isolation.restriction_note for peer in peers if peer.isolation and peer.isolation.restriction_note
    )
    limits = ["Weightstream by WEIGHTSTREAM_ISA", "torch, oneDNN and MKL by their environment variables", *restrictions]
    return f"**{machine}, restricted to {isa.title}**: {', '.join(limits)}."


def hardware() -> str:
    """The processor, its cores and memory, and torch's version."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{model} ({capability}), {os.cpu_count()} cores, {memory:.0f} GiB, torch {torch.__version__}"


def commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
