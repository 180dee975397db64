"""From rounds of measurements to a table: medians, spread, ratios, agreement; and where and how it was measured."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import pyarrow as pa
import torch

from runtime.units import GIB, format_bytes

from .attention import LINK_BYTES_PER_SECOND, layer_bytes
from .contenders import CONTENDERS, Act, Sweep
from .task import Result

Rounds = Mapping[str, Sequence[Result]]


def markdown(rounds: Rounds) -> str:
    """One row per contender; `batch` is how many sequences a peer was given at once. Ratios are to the first
    contender's median; `equal` counts sequences equal to transformers', or to the first contender's where transformers
    did not take part."""
    first = next(iter(rounds))
    base = median(result.rate for result in rounds[first])
    judge = rounds.get("transformers", rounds[first])[0].tokens
    lines = [
        "| contender | batch | rate, median (min-max) | ratio | peak memory above baseline | read per run | equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, results in rounds.items():
        rates = [result.rate for result in results]
        tokens = results[0].tokens
        unit = (lambda rate: f"{rate:.1f} tok/s") if tokens else (lambda rate: f"{rate / 1e9:.2f} GB/s")
        same = sum(ours == theirs for ours, theirs in zip(tokens, judge, strict=False))
        peak = median(result.peak_bytes - result.baseline_bytes for result in results)
        lines.append(
            f"| {name} | {results[0].batch_size or '-'} "
            f"| {unit(median(rates))} ({unit(min(rates))}-{unit(max(rates))}) | {median(rates) / base:.2f} "
            f"| {format_bytes(peak)} | {format_bytes(median(r.bytes_read for r in results))} "
            f"| {f'{same} of {len(judge)}' if tokens else '-'} |"
        )
    lines += ["", *beside_link(attended)] if (attended := _attended(rounds)) else []
    return "\n".join(lines)


def stated(num_rounds: int, command: str) -> str:
    """Where and how it was measured."""
    return f"{num_rounds} alternating rounds; `{command}`; {hardware()}; commit {commit()}."


def rounds_table(rounds: Rounds) -> pa.Table:
    """A row for each measurement; sequences are counted, not listed."""
    return pa.Table.from_pylist(
        [
            {"measured": name, "round": number, **asdict(result), "tokens": sum(map(len, result.tokens))}
            for name, results in rounds.items()
            for number, result in enumerate(results, start=1)
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Attended:
    name: str
    num_bytes: int
    rate: float


def _attended(rounds: Rounds) -> list[Attended]:
    return [
        Attended(name=name, num_bytes=layer_bytes(entry.dtype), rate=median(result.rate for result in rounds[name]))
        for contender, entry in CONTENDERS.items()
        if isinstance(entry, Sweep) and entry.act is not Act.read and (name := contender.value) in rounds
    ]


def beside_link(attended: Sequence[Attended]) -> list[str]:
    """Attention where the KV lies, measured, and what it takes on paper to only bring the same KV elsewhere."""
    lines = [
        "| one layer's KV | its bytes | attended, measured | copied over 16 GB/s, on paper | times faster |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.name} | {format_bytes(each.num_bytes)} | {each.num_bytes / each.rate * 1e3:.1f} ms "
        f"| {each.num_bytes / LINK_BYTES_PER_SECOND * 1e3:.1f} ms | {each.rate / LINK_BYTES_PER_SECOND:.2f} |"
        for each in attended
    ]
    return lines


def hardware() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{model} ({capability}), {os.cpu_count()} cores, {memory:.0f} GiB, torch {torch.__version__}"


def commit() -> str:
    try:
        described = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
