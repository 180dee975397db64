"""The text that `jobs.plan` prints."""

import re
from collections import Counter
from collections.abc import Iterable

from runtime.plan.cost.simulator import PhaseTime
from runtime.plan.plan_warnings import plan_warnings
from runtime.plan.shape.model import ModelShape
from runtime.plan.timeline import schedule_text
from runtime.resources import Resource
from runtime.units import format_bytes, format_count, format_seconds

from .planning import Planned
from .shapes import ITEM_BYTES

NUMBERED = re.compile(r"(?:^|\.)(?:\*|\d+)\.")  # a layer or an expert in the name of a parameter


def format_plan(planned: Planned, num_actions: int) -> str:
    """Formats ledgers (the bytes of each memory), policy, prediction, notes, and `num_actions` lines of the
    schedule."""
    run, view, machine, sizes = planned.run, planned.view, planned.machine, planned.sizes
    predicted, phases, (prefill, decode, total) = planned.prediction, planned.prediction.phases, planned.throughput
    longest, mean = max(size.num_prompt_tokens for size in sizes), planned.num_prompt_tokens / len(sizes)
    head = (
        f"{view.whole.name} ({format_bytes(view.whole.weight_bytes)} as stored) on {machine.name}: "
        f"{format_count(len(sizes), 'prompt')} of {mean:.0f} tokens on average and {longest:,} at most, "
        f"{format_count(sizes[0].max_new_tokens, 'new token')} each"
    )
    ranks = [
        f"ranks: {view.num_ranks}, devices={view.parallelism.value}; memory and schedule of one rank, tokens/s of all",
        f"  weights   each rank reads {format_bytes(view.weight_bytes)} of {format_bytes(view.whole.weight_bytes)}",
        f"  KV        each rank stores {format_bytes(view.kv_bytes_per_token)} per token, on average",
        f"  others    {planned.peer_wait_share:.0%} of the time is spent waiting for other ranks",
    ]
    prediction = [
        "predicted:",
        _line("prefill", prefill, planned.num_prompt_tokens, predicted.prefill_seconds),
        _line("decode", decode, planned.num_decoded_tokens, predicted.decode_seconds),
        _line("total", total, planned.num_new_tokens, predicted.seconds)
        + f", {format_seconds(predicted.stall_seconds)} of it waiting for bytes",
    ]

    def share(phase: PhaseTime, resource: Resource) -> str:
        """Formats the fraction of a phase in which a resource is busy, and its idle time during passes (bubbles)."""
        waits = format_seconds(phase.bubble_seconds(resource))
        limit = ", the limit" if resource is phase.binding else ""
        return f"{f'{phase.busy_seconds[resource] / phase.seconds:4.0%}, waits {waits}{limit}':<34}"

    used = [resource for resource in Resource if any(phase.busy_seconds[resource] for phase in phases.values())]
    busy = [
        f"{'busy:':<18}{''.join(f'{name:<34}' for name in phases)}".rstrip(),
        *(f"  {row.value:<16}{''.join(share(phase, row) for phase in phases.values())}".rstrip() for row in used),
    ]
    notes = plan_warnings(planned.config, planned.shape, run, has_device=machine.device_bytes is not None)
    parts = [
        "\n".join([head, *_format_storage(view.whole)]),
        *(["\n".join(ranks)] if view.num_ranks > 1 else []),
        *map(str, run.placement.ledgers),
        str(planned.resolved_settings),
        *(["\n  ".join(["chosen:", *run.choice.why])] if run.choice is not None else []),
        "\n".join(prediction),
        "\n".join(busy),
        *(f"note: {note}" for note in (*planned.warnings, *notes)),
        *([f"schedule:\n{schedule_text(run, max_actions=num_actions).rstrip()}"] if num_actions else []),
    ]
    return "\n\n".join(parts)


def _format_storage(shape: ModelShape) -> list[str]:
    """Formats a line for each format and dtype of a quantized model, with its bytes and modules. Empty for an
    unquantized model."""
    # modules: names by format and the first part of their path; inner dictionaries are ordered sets
    num_bytes, modules, seen = Counter[str](), dict[str, dict[str, dict[str, None]]](), set[str]()
    for parameter in (parameter for stage in shape.stages for parameter in stage.parameters):
        is_vector = len(parameter.shape) < 2
        path = "vectors" if is_vector else NUMBERED.split(parameter.name)[-1].removesuffix(".weight")
        group, _, module = path.removeprefix("model.").partition(".")
        for piece in (piece for entry in parameter.pieces for piece in entry):
            name = piece.format or piece.dtype
            modules.setdefault(name, {}).setdefault(group, {})[module] = None
            num_bytes[name] += piece.num_bytes if piece.name not in seen else 0
            seen.add(piece.name)
    if set(num_bytes) <= set(ITEM_BYTES):
        return []

    def format_group(group: str, members: Iterable[str]) -> str:
        names = ", ".join(filter(None, members))
        return f"{group} ({names})" if names else group

    return [
        f"  {name:<12}{format_bytes(count):>9}  {', '.join(format_group(*item) for item in modules[name].items())}"
        for name, count in num_bytes.most_common()
    ]


def _line(name: str, tokens_per_second: float | None, num_tokens: int, seconds: float) -> str:
    rate = "-" if tokens_per_second is None else f"{tokens_per_second:,.1f}"
    return f"  {name:<8}{rate:>10} tokens/s  {num_tokens:,} in {format_seconds(seconds)}"
