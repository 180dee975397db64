"""A sweep around a plan, from its axes to its files."""

from collections.abc import Iterator
from pathlib import Path

from runtime.plan.roofs import roofs_of

from .config import PlanConfig, Sweep
from .planning import Planned
from .roofline_picture import draw_roofline
from .sweep import Outcome, sweep, sweep_axes
from .sweep_picture import draw_sweep
from .sweep_table import HEAD, SweepRow, write_csv


def run_sweep(config: PlanConfig, planned: Planned, directory: Path) -> Iterator[str]:
    """The table's lines, each as its plan is made; behind the last one <sweep>.csv, <sweep>.png and roofline.png are
    published. Raises ConfigError, OutputError."""
    kind = config.plan.sweep
    assert kind is not None, "no sweep is asked for"
    roofs = roofs_of(planned.shape, planned.machine, config.offload.tier, planned.run)
    name = f"{planned.shape.name} on {planned.machine.name}"
    outcomes, rows = list[Outcome](), list[SweepRow]()
    yield HEAD
    for outcome in sweep(sweep_axes(config, planned)):
        outcomes.append(outcome)
        rows.append(SweepRow.of(outcome))
        yield str(rows[-1])
    write_csv(directory / f"{kind.value}.csv", rows)
    knee = roofs.needed_sequences if kind is Sweep.batch else None
    said = [name, f"policy={config.policy.kind.value}", *([] if knee is None else [f"P2 at {knee:,.0f} sequences"])]
    draw_sweep(directory / f"{kind.value}.png", outcomes, ", ".join(said), knee)
    block = f"a block of {roofs.num_sequences:,} sequences, {roofs.num_rows:,} at once in feed-forward layers"
    draw_roofline(directory / "roofline.png", roofs, f"{name}: a decode pass over {block}")
    if knee is not None:
        yield f"P2: with {knee:,.0f} sequences or more the road of weights no longer bounds feed-forward layers"
