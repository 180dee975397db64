"""Simulated timeline of a few passes of a plan, and the plan's schedule as text. A **lane** is a micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..config.settings import Admission
from .cost.durations import make_durations
from .cost.lane_work import LaneWork, PassGroup, block_prefills, decode_work
from .cost.predict import mixed_spans
from .cost.rates import MachineRates
from .cost.simulator import Durations, SimulatedPass, SimulatedSpan, simulate_passes
from .placement.defaults import chunk_tokens
from .placement.memory import SequenceSize
from .planner import RunPlan
from .schedule.schedule import Schedule, make_schedule
from .shape.model import ModelShape

NUM_DECODE_PASSES = 3


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A few simulated passes. The first one starts at second 0, before any weights are loaded into slots."""

    description: str
    names: Sequence[str]  # one per pass
    passes: Sequence[SimulatedPass]

    @property
    def spans(self) -> list[SimulatedSpan]:
        return [span for simulated in self.passes for span in simulated.spans]


def make_timeline(shape: ModelShape, plan: RunPlan, sizes: Sequence[SequenceSize], rates: MachineRates) -> Timeline:
    """Simulates the first prefill pass and the first decode passes of the first block.

    With continuous admission, a pass both prefills and decodes: simulates a typical pass several times instead.
    """
    placement, chunk = plan.placement, chunk_tokens(plan.policy)
    if plan.policy.admission is Admission.continuous and shape.is_packed:
        groups, count = mixed_spans(placement, plan.blocks, sizes, chunk), NUM_DECODE_PASSES + 1
        description = f"{count} mixed passes of prefill and decode, as in the middle of the run"
        names, shown = ["mixed pass"] * count, [groups[len(groups) // 2]] * count
    else:
        lanes = [[sizes[i] for i in group] for group in plan.blocks[0].micro_batches if group]
        prompts = block_prefills(shape, lanes, chunk, placement.sharing_rule)
        num_decode = max(size.max_new_tokens for lane in lanes for size in lane) - 1
        num_shown = min(NUM_DECODE_PASSES, num_decode)
        # The work of each lane, by pass; None: the lane has no work in that pass.
        works: list[list[LaneWork | None]] = [[lane[0] if lane else None for lane in prompts]]
        works += [[decode_work(shape, lane, number) for lane in lanes] for number in range(num_shown)]
        decode = f" and decode passes 1 to {num_shown} of {num_decode:,}" if num_shown else ""
        description = f"prefill pass 1 of {max(map(len, prompts)):,}{decode} of the first block"
        names = ["prefill pass", *(f"decode pass {number + 1}" for number in range(num_shown))]
        shown = [
            PassGroup(lanes=[work for work in lane_works if work is not None], prefill_share=0.0 if number else 1.0)
            for number, lane_works in enumerate(works)
        ]
    passes = list[tuple[Schedule, Durations]]()
    for group in shown:
        walk, lanes = placement.walk if group.is_prefill else placement.decode_walk, group.lanes
        passes.append((make_schedule(walk, len(lanes)), make_durations(shape, placement, walk, lanes, rates)))
    return Timeline(description=description, names=names, passes=simulate_passes(passes, rates.pass_seconds))


MAX_ACTIONS = 20_000  # about 200 KB of text; 80 layers with 16 lanes have about 3,000


def schedule_text(plan: RunPlan, *, max_actions: int = MAX_ACTIONS) -> str:
    """Returns the schedule of the first block: the actions before its first pass, one prefill pass and one decode pass.

    Each line is an action that `parse_action` can read, or a comment that starts with `#`. Actions after the first
    `max_actions` are omitted.
    """
    num_lanes = len(plan.blocks[0].micro_batches) if plan.blocks else plan.num_lanes
    of_lanes = f"of {num_lanes} micro-batch{'es' if num_lanes > 1 else ''}"
    prefill, decode = (make_schedule(walk, num_lanes) for walk in (plan.placement.walk, plan.placement.decode_walk))
    sections = [("before the first prefill pass", prefill.prologue), (f"a prefill pass {of_lanes}", prefill.cycle)]
    if decode.prologue != prefill.prologue:  # otherwise the prefill pass already filled the slots
        sections.append(("before the first decode pass", decode.prologue))
    sections.append((f"a decode pass {of_lanes}", decode.cycle))
    lines, num_actions = list[str](), 0
    for heading, actions in sections:
        shown = actions[: max(0, max_actions - num_actions)]
        num_actions += len(actions)
        lines += [f"# {heading}: {len(actions):,} actions", *map(str, shown)]
    if num_actions > max_actions:
        lines.append(f"# {num_actions - max_actions:,} of {num_actions:,} actions are omitted")
    return "\n".join(lines) + "\n"
