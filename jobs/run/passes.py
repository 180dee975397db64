"""What the engine records of a pass, as a row of `throughput/`: seconds in lists by stage, and their sums."""

from dataclasses import replace

from runtime.engine.records import PassRecord
from runtime.plan.cost.predict import Prediction

from .phase_times import mean_pass
from .summary import PassRow

APART = ("block", "index", "phase", "counts", "times")


def pass_row(record: PassRecord, pass_index: int, prediction: Prediction | None = None) -> PassRow:
    """`prediction` is of the whole run."""
    times = record.times
    lists = {f"stage_{name}": list(value) for name, value in vars(times).items() if isinstance(value, tuple)}
    sums = {name: value for name, value in vars(times).items() if isinstance(value, int)}
    row = PassRow(
        pass_index=pass_index,
        phase=record.phase.value,
        load_seconds=sum(times.read_seconds),
        copy_seconds=sum(times.copy_seconds),
        compute_seconds=sum(times.compute_seconds),
        attention_seconds=sum(times.attention_seconds),
        stall_seconds=sum(times.stall_seconds),
        **vars(record.counts),
        **sums,
        **lists,
        **{name: value for name, value in vars(record).items() if name not in APART},
    )
    if prediction is None:
        return row
    predicted = vars(mean_pass(prediction, row.prefill_share))
    return replace(row, **{f"predicted_{name}": value for name, value in predicted.items()})
