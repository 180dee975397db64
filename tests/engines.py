"""Engines of data for real: each generates the rows of one table, which must be those of a plain call.

By hand, in an environment that has the engine beside Weightstream: `python -m tests.engines ray` (or `spark`, `daft`,
`datatrove`). `ray kill` ends an actor without a word and looks at what it had finished; `page ray` runs what
docs/how-to/data-engines.md shows, as a script of its own.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pyarrow as pa

from jobs.tables import TableGenerator
from runtime import PolicyConfig, Runtime

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "data-engines.md"
NUM_ROWS, TABLE_ROWS, NUM_WORKERS = 1_000, 250, 2
SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "offload": "nvme",
    "host_memory_gib": 1,
    "policy": PolicyConfig(kind="fixed", micro_batch_size=25, num_micro_batches=2),
    "max_new_tokens": 32,
    "ignore_eos": True,
}


def prompts() -> pa.Table:
    numbers = [[(7 * row + 3 * place) % 97 for place in range(2 + row % 5)] for row in range(NUM_ROWS)]
    texts = [f"Q: Sort these numbers: {' '.join(map(str, each))} A:" for each in numbers]
    return pa.table({"key": [f"row {row}" for row in range(NUM_ROWS)], "prompt": texts})


def parts(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("table-*/generations/part-*.parquet")}


def kill_a_worker(folder: Path, killed: list[dict[Path, int]]) -> None:
    """Ends the process that holds a lease, once three parts are there."""
    while len(parts(folder)) < 3:
        time.sleep(0.01)
    for lease in folder.glob("table-*/leases/block-*.json"):
        process = json.loads(lease.read_text())["pid"]
        os.kill(process, signal.SIGKILL)
        killed.append(parts(folder))
        print(f"killed process {process}, which worked on {lease.parent.parent.name}", flush=True)
        return


def with_ray(table: pa.Table, folder: Path, *, is_killed: bool) -> pa.Table:
    import ray

    ray.init(num_cpus=NUM_WORKERS, include_dashboard=False)
    killed: list[dict[Path, int]] = []
    if is_killed:
        Thread(target=kill_a_worker, args=(folder, killed), daemon=True).start()
    data = ray.data.from_arrow([table.slice(first, TABLE_ROWS) for first in range(0, len(table), TABLE_ROWS)])
    output = data.map_batches(
        TableGenerator,
        fn_constructor_kwargs={**SETTINGS, "output_root": str(folder)},
        batch_format="pyarrow",
        batch_size=TABLE_ROWS,
        compute=ray.data.ActorPoolStrategy(size=NUM_WORKERS),
        num_cpus=1,
    ).materialize()
    answered = pa.concat_tables(ray.get(output.to_arrow_refs()))
    if is_killed:
        now = parts(folder)
        assert killed, "nobody was killed"
        assert all(now[path] == moment for path, moment in killed[0].items()), "a finished block was made again"
        print(f"{len(killed[0])} of {len(now)} parts were there when it was killed, and are as they were")
    return answered


def with_spark(table: pa.Table, folder: Path) -> pa.Table:
    from pyspark.sql import SparkSession
    from pyspark.sql.pandas.types import from_arrow_schema

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master(f"local[{NUM_WORKERS}]").config("spark.ui.enabled", "false").getOrCreate()
    generator = TableGenerator(**SETTINGS, output_root=str(folder))
    frame = spark.createDataFrame(table).repartition(4)
    return frame.mapInArrow(generator.batches, from_arrow_schema(generator.schema(table.schema))).toArrow()


def with_daft(table: pa.Table, folder: Path) -> pa.Table:
    import daft

    generator = TableGenerator(**SETTINGS, output_root=str(folder))
    kind = daft.DataType.from_arrow_type(generator.struct_type)

    @daft.func.batch(return_dtype=kind, batch_size=TABLE_ROWS, unnest=True)
    def generated(prompt: daft.Series) -> pa.StructArray:
        return generator.structs(pa.table({"prompt": prompt.to_arrow()}))

    frame = daft.from_arrow(table)
    return frame.select(frame["key"], frame["prompt"], generated(frame["prompt"])).to_arrow()


def with_datatrove(table: pa.Table, folder: Path) -> pa.Table:
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.writers import JsonlWriter

    def read(data: object, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for row in table.to_pylist()[rank::world_size]:
            yield Document(text=row["prompt"], id=row["key"])

    generator = TableGenerator(**SETTINGS, prompt="text", output_root=str(folder / "runs"))
    writer = JsonlWriter(str(folder / "out"), compression=None)
    LocalPipelineExecutor(
        pipeline=[read, generator.documents, writer],
        tasks=NUM_WORKERS,
        workers=NUM_WORKERS,
        logging_dir=str(folder / "logs"),
    ).run()
    rows = [json.loads(line) for path in (folder / "out").glob("*") for line in path.read_text().splitlines()]
    return pa.Table.from_pylist([{"key": row["id"], "prompt": row["text"], **row["metadata"]} for row in rows])


HEADINGS = {"ray": "Ray Data", "spark": "Spark", "daft": "Daft", "datatrove": "datatrove"}
ENGINES: dict[str, Callable[..., pa.Table]] = {
    "ray": with_ray,
    "spark": with_spark,
    "daft": with_daft,
    "datatrove": with_datatrove,
}


def page(heading: str) -> None:
    """Runs the blocks of a section of the page as a reader would, in an empty folder."""
    text = PAGE.read_text(encoding="utf-8")
    section = re.split(r"^#+ ", text[text.index(f"## {heading}") + 3 :], flags=re.MULTILINE)[0]
    script = "\n".join(re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))
    with TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(script, encoding="utf-8")
        activated = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        subprocess.run([sys.executable, "script.py"], cwd=folder, check=True, env=os.environ | activated)
        print(f"{heading}: {len(list(Path(folder).rglob('_SUCCESS.json')))} tables are kept")


def main(engine: str, *words: str) -> None:
    table, begin = prompts(), time.monotonic()
    expected = Runtime(**SETTINGS).generate_table(table)
    print(f"plain: {len(expected):,} rows in {time.monotonic() - begin:.1f} s", flush=True)
    begin = time.monotonic()
    with TemporaryDirectory() as folder:
        more = {"is_killed": "kill" in words} if engine == "ray" else {}
        rows = ENGINES[engine](table, Path(folder), **more)
        num_tables = len(list(Path(folder).rglob("_SUCCESS.json")))
    print(f"{engine}: {len(rows):,} rows of {num_tables} tables in {time.monotonic() - begin:.1f} s")
    columns = ["key", "prompt", "status", "completion", "token_ids", "finish_reason", "num_prompt_tokens"]
    assert rows.select(columns).sort_by("key").to_pylist() == expected.select(columns).sort_by("key").to_pylist()
    print("equal, row by row")


if __name__ == "__main__":
    if sys.argv[1] == "page":
        page(HEADINGS[sys.argv[2]])
    else:
        main(*sys.argv[1:])
