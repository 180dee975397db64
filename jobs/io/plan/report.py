"""A plan as the text that `jobs.plan` prints."""

from runtime.plan.advice import advice
from runtime.plan.facts import PlanFacts
from runtime.plan.listing import schedule_text
from runtime.units import format_bytes, format_seconds

from .planning import Planned


def report(planned: Planned, num_actions: int) -> str:
    """The ledgers, the policy, the prediction, what is worth knowing, and `num_actions` of the schedule."""
    run = planned.run
    facts = PlanFacts.of(planned.config, planned.shape, run, dtype=planned.dtype.value)
    notes = advice(planned.config, planned.shape, run, has_device=planned.machine.device_bytes is not None)
    parts = [
        _head(planned),
        *map(str, run.placement.ledgers),
        str(facts),
        *(["\n  ".join(["chosen:", *run.choice.why])] if run.choice is not None else []),
        _prediction(planned),
        *(f"note: {note}" for note in notes),
        *([f"schedule:\n{schedule_text(run, max_actions=num_actions).rstrip()}"] if num_actions else []),
    ]
    return "\n\n".join(parts)


def _head(planned: Planned) -> str:
    shape, machine, sizes = planned.shape, planned.machine, planned.sizes
    longest = max(size.num_prompt_tokens for size in sizes)
    return (
        f"{shape.name} ({format_bytes(shape.weight_bytes)} as stored) on {machine.name}: {len(sizes):,} prompts of "
        f"{planned.num_prompt_tokens / len(sizes):.0f} tokens in the mean and {longest:,} at most, "
        f"{sizes[0].max_new_tokens:,} new tokens each"
    )


def _prediction(planned: Planned) -> str:
    """Tokens per second as runs count them: what prefill passes compute, what decode passes generate, and all that is
    generated over both."""
    predicted, num_new = planned.run.prediction, planned.num_new_tokens
    assert predicted is not None, "a machine has rates"
    both = predicted.prefill_seconds + predicted.decode_seconds
    num_decoded = max(0, num_new - len(planned.sizes))
    return "\n".join(
        [
            "predicted:",
            _line("prefill", planned.num_prompt_tokens, predicted.prefill_seconds),
            _line("decode", num_decoded, predicted.decode_seconds),
            f"{_line('total', num_new, both)}, {format_seconds(predicted.stall_seconds)} of it waiting for bytes",
        ]
    )


def _line(name: str, num_tokens: int, seconds: float) -> str:
    rate = f"{num_tokens / seconds:,.1f}" if seconds else "-"
    return f"  {name:<8}{rate:>10} tokens/s  {num_tokens:,} in {format_seconds(seconds)}"
