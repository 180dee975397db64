"""The adapter for engines of data: one call behind many faces, and what it keeps when its process is killed."""

import logging
import os
import pickle
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.files import publishing
from jobs.tables import TableGenerator
from jobs.tables import generator as tables
from jobs.tables.generator import BlockUnderfill, find_underfill
from runtime import PolicyConfig, Runtime
from runtime.errors import ConfigError, RunMismatchError
from runtime.plan.cost.rates import MachineRates
from runtime.planning.planner import Planner
from runtime.sequences.sequence import Request
from tests.processes import PROCESSES

NUM_ROWS = 12
TABLE = pa.table(
    {"key": range(NUM_ROWS), "prompt": [*(f"Sort these numbers: {n} 3 {n + 1}" for n in range(NUM_ROWS - 1)), None]}
)
SMALL = PolicyConfig(kind="fixed", micro_batch_size=4, num_micro_batches=1)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    tables.close()


@pytest.fixture(scope="module")
def plain() -> pa.Table:
    """What the library makes of the table."""
    return Runtime(model="tiny", max_new_tokens=6).generate_table(TABLE)


@pytest.fixture
def generator() -> TableGenerator:
    return TableGenerator(model="tiny", max_new_tokens=6, policy=SMALL)


@pytest.fixture
def kept(tmp_path: Path) -> TableGenerator:
    return TableGenerator(model="tiny", max_new_tokens=6, policy=SMALL, output_root=str(tmp_path))


def parts(folder: Path) -> dict[str, int]:
    """Each part with the moment that it was written at."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("table-*/generations/part-*.parquet")}


def test_a_table_comes_back_with_the_columns_of_generate_table_kept_or_not(
    generator: TableGenerator, kept: TableGenerator, plain: pa.Table
) -> None:
    assert generator(TABLE) == plain
    assert kept(TABLE) == plain
    assert generator.schema(TABLE.schema) == plain.schema


def test_a_table_that_is_given_again_is_read_and_another_is_made(
    kept: TableGenerator, plain: pa.Table, tmp_path: Path
) -> None:
    kept(TABLE)
    before = parts(tmp_path)
    assert kept(TABLE) == plain
    assert parts(tmp_path) == before
    half = TABLE.slice(0, 5)
    assert kept(half).column("token_ids") == plain.slice(0, 5).column("token_ids")
    assert len(list(tmp_path.glob("table-*"))) == 2


def test_what_was_kept_with_other_settings_is_refused(kept: TableGenerator, tmp_path: Path) -> None:
    kept(TABLE)
    other = TableGenerator(model="tiny", max_new_tokens=5, policy=SMALL, output_root=str(tmp_path))
    with pytest.raises(RunMismatchError, match="max_new_tokens"):
        other(TABLE)


def killed_after_two_parts(generator: TableGenerator) -> None:
    """The process ends, without a word, right behind the commit of its second part."""
    make_lasting = publishing.fsync_directory

    def commit(directory: Path) -> None:
        make_lasting(directory)
        if directory.name == "generations" and len(list(directory.glob("part-*"))) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    publishing.fsync_directory = commit
    generator(TABLE)


def test_a_killed_process_loses_no_block_that_was_finished(
    kept: TableGenerator, plain: pa.Table, tmp_path: Path
) -> None:
    process = PROCESSES.Process(target=killed_after_two_parts, args=(kept,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    before = parts(tmp_path)
    assert len(before) == 2
    assert kept(TABLE) == plain
    after = parts(tmp_path)
    assert {name: after[name] for name in before} == before
    assert len(after) == 4, "a part for each block of four rows, and one for the row without a prompt"


def test_record_batches_are_joined_into_windows(generator: TableGenerator, plain: pa.Table, tmp_path: Path) -> None:
    given = TABLE.to_batches(max_chunksize=2)
    assert pa.Table.from_batches(generator.batches(iter(given))) == plain
    assert list(generator.batches(iter([]))) == []
    windowed = TableGenerator(model="tiny", max_new_tokens=6, policy=SMALL, window=5, output_root=str(tmp_path))
    assert pa.Table.from_batches(windowed.batches(iter(given))) == plain
    assert len(list(tmp_path.glob("table-*"))) == 2, "of six rows each, as whole batches come to"


def test_structs_hold_the_results_alone(generator: TableGenerator, plain: pa.Table) -> None:
    found = generator.structs(TABLE)
    assert found.type == generator.struct_type
    assert found.to_pylist() == plain.drop_columns(TABLE.column_names).to_pylist()


@dataclass
class Document:
    text: str
    id: str
    metadata: dict = field(default_factory=dict)


def test_documents_have_their_results_among_their_metadata(plain: pa.Table) -> None:
    generator = TableGenerator(
        model="tiny", max_new_tokens=6, prompt="text", overrides={"max_new_tokens": "limit"}, window=2, prefix="new_"
    )
    data = [Document(text=TABLE["prompt"][n].as_py(), id=f"0/{n}", metadata={"kept": n}) for n in range(3)]
    data[2].metadata["limit"] = 2
    found = list(generator.documents(iter(data)))
    assert [each.metadata["kept"] for each in found] == [0, 1, 2]
    expected = [plain["token_ids"][n].as_py() for n in range(3)]
    assert [each.metadata["new_token_ids"] for each in found] == [*expected[:2], expected[2][:2]]
    assert list(generator.documents(None)) == []


def test_it_is_sent_to_other_processes_before_and_after_it_has_opened_a_model(generator: TableGenerator) -> None:
    sent = pickle.dumps(generator)
    first = generator(TABLE)
    assert pickle.loads(sent)(TABLE) == first
    assert pickle.dumps(generator) == sent


def test_a_process_holds_one_model_open_for_all_its_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Runtime] = []
    monkeypatch.setattr(tables, "Runtime", lambda config: made.append(Runtime(config)) or made[-1])
    for most in (2, 2, 3):
        TableGenerator(model="tiny", max_new_tokens=most)(TABLE)
    assert len(made) == 2
    assert [runtime._is_closed for runtime in made] == [True, False]


def test_a_table_far_from_filling_a_block_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = BlockUnderfill(num_rows=NUM_ROWS, block_rows=512, rate=1.5, block_rate=40.0)
    monkeypatch.setattr(tables, "find_underfill", lambda planner, sizes: found if len(sizes) == NUM_ROWS - 1 else None)
    generator = TableGenerator(model="tiny", max_new_tokens=2)
    with caplog.at_level(logging.WARNING):
        generator(TABLE)
        generator(TABLE)
    said = [record.getMessage() for record in caplog.records if "a block has room" in record.getMessage()]
    assert said == [
        "rows per table: 12; a block has room for 512. Predicted: 40.0 rows/s with a full block, 1.5 with these. "
        "Pass larger tables"
    ]


def test_few_rows_from_disk_are_far_from_a_block_and_many_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_disk = MachineRates(disk_bytes_per_second=5e6, gemm_flops_per_second={1: 1e9, 64: 1e11})
    monkeypatch.setattr(Planner, "measure", lambda *_: slow_disk)
    runtime = Runtime(model="tiny", max_new_tokens=8, offload="nvme")
    asked = [runtime.request(str(n), f"Reverse: {n}") for n in range(8)]
    few = find_underfill(runtime.planner, [each.size for each in asked if isinstance(each, Request)])
    assert few is not None
    assert few.block_rows > 8 * 2
    assert few.block_rate > few.rate


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": 0.7}, "sampling needs stable ids or seeds"),
        ({"overrides": {"temperature": "heat"}}, "sampling needs stable ids or seeds"),
        ({"window": 0}, "window must be 1 or more rows"),
        ({"output_root": ""}, "output_root is empty"),
        ({"hostmemory_gib": 3}, "did you mean host_memory_gib"),
    ],
)
def test_a_mistake_is_said_where_the_generator_is_made(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TableGenerator(model="tiny", **settings)


def test_draws_are_those_of_rows_by_their_ids_however_an_engine_cuts_them() -> None:
    generator = TableGenerator(model="tiny", max_new_tokens=6, temperature=1.0, id="key")
    whole, cut = generator(TABLE), [generator(TABLE.slice(first, 5)) for first in (0, 5, 10)]
    assert pa.concat_tables(cut)["token_ids"].to_pylist() == whole["token_ids"].to_pylist()
