"""The table of `suite=gpu`: rates beside each other, and what they make of the link."""

from collections.abc import Mapping, Sequence
from operator import eq
from statistics import median

from runtime.units import format_bytes

from .link import described, peak_bytes_per_second
from .messages import Machine, Measurement
from .phases import HEAD, phase_rows

BASE = "accelerate cpu_offload"  # that ratios are to; where it did not run, the first


def gpu_table(machine: Machine, measured: Sequence[Measurement], device_memory_gib: float) -> str:
    """Bytes over the link are counted by the streams; for what a peer offloads, all weights in each forward."""
    rounds: dict[str, list[Measurement]] = {}
    for each in measured:
        if each.result is not None:
            rounds.setdefault(each.way, []).append(each)
    base = _rate(rounds[BASE if BASE in rounds else next(iter(rounds))]) if rounds else 0.0
    refusals = [f"{each.way} cannot run here: {each.refusal}" for each in measured if each.refusal]
    return "\n".join(
        [
            f"{machine.device}, of whose memory {device_memory_gib:g} GiB may be used; "
            f"{machine.num_layers} layers of Mixtral, {format_bytes(machine.weight_bytes)} of random bf16 in host "
            "memory.",
            described(machine.link),
            "",
            "| way | layers | sequences | tokens/s, median (min-max) | ratio | prefill | decode | device memory "
            "| to the device | of the pinned peak | equal |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *(_row(name, each, base, machine) + _equal(each[0], rounds) for name, each in rounds.items()),
            "",
            *_phases(rounds),
            *(f"\n{refusal}" for refusal in refusals),
        ]
    )


def _phases(rounds: Mapping[str, Sequence[Measurement]]) -> list[str]:
    rows = [row for name, each in rounds.items() for row in phase_rows(name, [one.phases for one in each])]
    return [HEAD, "|---|---|---|---|---|---|---|---|---|", *rows] if rows else []


def _row(name: str, measured: Sequence[Measurement], base: float, machine: Machine) -> str:
    results = [each.result for each in measured if each.result is not None]
    rates, first = [result.rate for result in results], measured[0]
    prefill = median(result.prefill_seconds for result in results)
    decode = median(result.seconds - result.prefill_seconds for result in results)
    copied = median(result.bytes_copied for result in results)
    rate = median(result.bytes_copied / result.seconds for result in results)
    share = rate / peak_bytes_per_second(machine.link) if copied and machine.link else 0.0
    peak = max(result.peak_device_bytes for result in results)
    return (
        f"| {name} | {first.num_layers} | {first.num_sequences} "
        f"| {median(rates):.1f} ({min(rates):.1f}-{max(rates):.1f}) | {median(rates) / base:.2f} "
        f"| {prefill:.2f} s | {decode:.2f} s | {format_bytes(peak) if peak else '-'} "
        f"| {format_bytes(copied) if copied else '-'} | {f'{share:.0%}' if share else '-'} |"
    )


def _equal(measured: Measurement, rounds: Mapping[str, Sequence[Measurement]]) -> str:
    """Sequences with the tokens of the first way over the same layers. In bf16 other shapes of products round
    otherwise, and one token that differs makes the next ones differ."""
    judge = next(each[0] for each in rounds.values() if each[0].num_layers == measured.num_layers)
    assert measured.result is not None, "the table is of results"
    assert judge.result is not None, "the table is of results"
    ours, theirs = measured.result.tokens, judge.result.tokens
    return f" {sum(map(eq, ours, theirs))} of {min(len(ours), len(theirs))} |"


def _rate(measured: Sequence[Measurement]) -> float:
    return median(each.result.rate for each in measured if each.result is not None)
