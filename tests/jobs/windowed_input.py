"""An input of 25 rows in two files, a bad one among them, and runs of it in windows or whole."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig, DatasetKind, ShardConfig
from jobs.record.run_dir import RunDirectory
from jobs.record.summary import Outcome
from jobs.run.tasks.generate import generate
from runtime.config.settings import PolicyConfig, PolicyKind, SamplingConfig
from tests.generations import read_generations

NUM_ROWS, NUM_IN_FIRST, BAD_ROW = 25, 10, 15
SMALL_BLOCKS = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=4, num_micro_batches=1)


def records(num_rows: int = NUM_ROWS) -> list[dict[str, Any]]:
    """The rows; two columns get their types, and one of them its name, from the last file alone."""
    rows: list[dict[str, Any]] = [{"key": f"row {i}", "prompt": f"Q: {i}+{i % 7} A:", "n": i} for i in range(num_rows)]
    rows[-1] |= {"n": 0.5, "late": "column"}
    rows[BAD_ROW]["prompt"] = ""
    return rows


@dataclass(frozen=True, kw_only=True)
class WindowedInput:
    """`home`: where input and runs lie."""

    home: Path
    kind: str = "jsonl"

    def write(self, rows: list[dict[str, Any]] | None = None) -> "WindowedInput":
        """The input as two files, with an empty line between rows and groups of three rows."""
        rows = rows or records()
        folder = self.home / "input"
        folder.mkdir(exist_ok=True)
        for name, part in (("a", rows[:NUM_IN_FIRST]), ("b", rows[NUM_IN_FIRST:])):
            if self.kind == "jsonl":
                (folder / f"{name}.jsonl").write_text("\n \n".join(json.dumps(row) for row in part) + "\n")
            else:
                pq.write_table(pa.Table.from_pylist(part), folder / f"{name}.parquet", row_group_size=3)
        return self

    def config(self, run: str, window_rows: int | None, **changes: Any) -> GenerateConfig:
        """A run of the input; `dataset` among the changes has further settings of the data set."""
        dataset = DatasetConfig(
            kind=DatasetKind[self.kind], path=str(self.home / "input"), id_field="key", window_rows=window_rows
        )
        values: dict[str, Any] = {
            "run": run,
            "output_root": str(self.home),
            "policy": SMALL_BLOCKS,
            "sampling": SamplingConfig(max_new_tokens=3, ignore_eos=True),
        }
        own = replace(dataset, **changes.pop("dataset", {}))
        values |= changes
        return GenerateConfig(dataset=own, **values)

    def run(self, run: str, window_rows: int | None, **changes: Any) -> Outcome:
        """A start of the run up to its end."""
        return generate(self.config(run, window_rows, **changes), lambda: False)

    def directory(self, run: str, shard: ShardConfig | None = None) -> RunDirectory:
        """Where the run lies."""
        suffix = "" if shard is None else f"-{shard.index:05d}-of-{shard.count:05d}"
        return RunDirectory(path=self.home / "generate" / f"{run}{suffix}")

    def rows(self, run: str, shard: ShardConfig | None = None) -> list[dict[str, Any]]:
        """The output rows in the order of the input, without their seats."""
        table = read_generations(self.directory(run, shard)).drop_columns(["block", "micro_batch"])
        return table.sort_by([("row_index", "ascending"), ("sample_index", "ascending")]).to_pylist()
