"""What runs when in a few passes of a plan: as the simulator plays them, and as text, an action a line. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..batching.prefixes import SharingRule
from ..config.settings import Admission
from .cost.durations import durations
from .cost.lane_work import LaneWork, block_prefills, decode_work
from .cost.predict import Stretch, mixed_stretches
from .cost.rates import MachineRates
from .cost.simulator import Durations, PlayedPass, Span, play_passes
from .placement.defaults import chunk_tokens
from .placement.memory import MicroBatch, SequenceSize
from .placement.placement import Placement
from .planner import RunPlan
from .schedule.actions import Action
from .schedule.schedule import Schedule, make_schedule
from .shape.model import ModelShape

NUM_DECODE_PASSES = 3


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """`which`: the passes that are shown, in words. They begin with empty slots, at second 0."""

    which: str
    names: Sequence[str]
    passes: Sequence[PlayedPass]

    @property
    def spans(self) -> list[Span]:
        return [span for each in self.passes for span in each.spans]


@dataclass(frozen=True, kw_only=True)
class _Passes:
    which: str
    names: Sequence[str]
    stretches: Sequence[Stretch]


def make_timeline(shape: ModelShape, plan: RunPlan, sizes: Sequence[SequenceSize], rates: MachineRates) -> Timeline:
    """The timeline of the first block: its first prefill pass and its first decode passes, as if the one followed the
    other at once; of continuous admission passes from the middle of the run."""
    if plan.policy.admission is Admission.continuous and shape.is_packed:
        shown = _mixed(plan, sizes)
    else:
        lanes = [[sizes[i] for i in group] for group in plan.blocks[0].micro_batches if group]
        shown = _of_block(shape, lanes, chunk_tokens(plan.policy), plan.placement.sharing)
    passes = [_priced(shape, plan.placement, each, rates) for each in shown.stretches]
    return Timeline(which=shown.which, names=shown.names, passes=play_passes(passes, rates.pass_seconds))


def _priced(
    shape: ModelShape, placement: Placement, stretch: Stretch, rates: MachineRates
) -> tuple[Schedule, Durations]:
    walk = placement.walk if stretch.is_prefill else placement.decode_walk
    return make_schedule(walk, len(stretch.lanes)), durations(shape, placement, walk, stretch.lanes, rates)


def _mixed(plan: RunPlan, sizes: Sequence[SequenceSize]) -> _Passes:
    found = mixed_stretches(plan.placement, plan.blocks, sizes, chunk_tokens(plan.policy))
    count = NUM_DECODE_PASSES + 1
    return _Passes(
        which=f"{count} passes like the one in the middle of the run, prompts beside tokens that are decoded",
        names=["mixed pass"] * count,
        stretches=[found[len(found) // 2]] * count,
    )


def _of_block(shape: ModelShape, lanes: Sequence[MicroBatch], chunk_tokens: int, rule: SharingRule) -> _Passes:
    prompts = block_prefills(shape, lanes, chunk_tokens, rule)
    num_prefill = max(map(len, prompts))
    num_decode = max(size.max_new_tokens for lane in lanes for size in lane) - 1
    num_shown = min(NUM_DECODE_PASSES, num_decode)
    works: list[list[LaneWork | None]] = [[lane[0] if lane else None for lane in prompts]]
    works += [[decode_work(shape, lane, turn) for lane in lanes] for turn in range(num_shown)]
    decode = f" and decode passes 1 to {num_shown} of {num_decode:,}" if num_shown else ""
    return _Passes(
        which=f"prefill pass 1 of {num_prefill:,}{decode} of the first block",
        names=["prefill pass", *(f"decode pass {number + 1}" for number in range(num_shown))],
        stretches=[
            Stretch(
                num_passes=1,
                lanes=[work for work in each if work is not None],
                prefill_share=0.0 if number else 1.0,
            )
            for number, each in enumerate(works)
        ],
    )


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
