"""The schedules of a run as text: a line per action, headings behind `#`. `actions.py` says what each line means."""

from collections.abc import Iterator

from .planner import RunPlan
from .schedule.actions import Action
from .schedule.schedule import make_schedule

MAX_ACTIONS = 20_000  # some 200 KB; 80 layers and 16 lanes make about 3,000


def schedule_text(plan: RunPlan, *, max_actions: int = MAX_ACTIONS) -> str:
    """The schedule of the first block: what comes before its first pass, then one prefill pass and one decode pass.
    `parse_action` reads every line that does not begin with `#`. Only the first `max_actions` are there; a last line
    says how many are not."""
    lines: list[str] = []
    num_actions = 0
    for heading, actions in _sections(plan):
        shown = actions[: max(0, max_actions - num_actions)]
        num_actions += len(actions)
        lines += [f"# {heading}: {len(actions):,} actions", *map(str, shown)]
    if num_actions > max_actions:
        lines.append(f"# the other {num_actions - max_actions:,} of {num_actions:,} actions are left out")
    return "\n".join(lines) + "\n"


def _sections(plan: RunPlan) -> Iterator[tuple[str, tuple[Action, ...]]]:
    num_lanes = len(plan.blocks[0].micro_batches) if plan.blocks else plan.num_lanes
    of_lanes = f"of {num_lanes} micro-batch{'es' if num_lanes > 1 else ''}"
    prefill, decode = (make_schedule(walk, num_lanes) for walk in (plan.placement.walk, plan.placement.decode_walk))
    yield "before the first prefill pass", prefill.prologue
    yield f"a prefill pass {of_lanes}", prefill.cycle
    if decode.prologue != prefill.prologue:  # otherwise the slots hold what the prefill pass has read ahead
        yield "before the first decode pass", decode.prologue
    yield f"a decode pass {of_lanes}", decode.cycle
