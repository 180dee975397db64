"""Run directories: a finished run and one that was stopped, each with one file that is nearly what it was."""

import io
import random
import shutil
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.config.settings import GenerateConfig, run_directory
from jobs.datasets import DatasetConfig
from jobs.record.run_dir import RunDirectory
from jobs.run.tasks.generate import generate
from runtime.config.settings import PolicyConfig, PolicyKind, SamplingConfig
from tests.fuzz.mutate import mutated, mutated_json
from tests.fuzz.target import Files, OutsideError, Target
from tests.generations import read_generations

Rows = list[tuple[str, int, str, tuple[int, ...]]]


def config(root: Path) -> GenerateConfig:
    return GenerateConfig(
        run="r",
        output_root=str(root),
        dataset=DatasetConfig(limit=4),
        sampling=SamplingConfig(max_new_tokens=2, ignore_eos=True),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=1, num_micro_batches=2),
    )


@cache
def finished(home: Path) -> Rows:
    """Makes the run that all cases are copies of."""
    generate(config(home), lambda: False)
    return rows_of(home)


def rows_of(root: Path) -> Rows:
    table = read_generations(RunDirectory(path=run_directory(config(root)))).to_pylist()
    return sorted((row["id"], row["sample_index"], row["status"], tuple(row["token_ids"] or ())) for row in table)


def seeds(home: Path) -> list[Files]:
    finished(home)
    directory = run_directory(config(home))
    every = {
        str(file.relative_to(home)): file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file.name != ".lock"
    }
    left_out = ("_SUCCESS.json", "part-00001.parquet")
    stopped = {name: content for name, content in every.items() if not name.endswith(left_out)}
    return [every, stopped, stopped | {str(directory.relative_to(home) / "running.parquet"): parquet({"id": ["a"]})}]


def parquet(columns: dict[str, list[object]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def corpus(home: Path) -> list[Files]:
    every, stopped, _ = seeds(home)
    return [
        {**of, name: content}
        for of in (every, stopped)
        for name in of
        if not name.endswith((".txt", ".log"))
        for content in (b"", of[name][:50], b"[1", b"[" * 100_000 if name.endswith(".json") else parquet({"a": [1]}))
    ]


def check(directory: Path, rng: random.Random) -> None:
    """Goes on with the run. What it ends with must be the rows of the undamaged one."""
    outcome = generate(config(directory), lambda: False)
    if rows_of(directory) != finished(directory.parent):
        raise OutsideError(f"exit {outcome.exit_code}, but other rows")
    shutil.rmtree(directory, ignore_errors=True)


TARGETS = (
    Target(name="run", seeds=seeds, corpus=corpus, check=check, how={".json": mutated_json, ".parquet": mutated}),
)
