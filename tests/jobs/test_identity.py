"""A run belongs to one model and one input: whatever of them is changed between two starts is refused, by file and key
or by column and row."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.record.run_dir import RunDirectory
from jobs.record.summary import Outcome
from jobs.run import run as generation
from jobs.run.tasks.generate import generate
from runtime import Runtime, RuntimeConfig
from runtime.config.settings import ModelConfig, PolicyConfig, PolicyKind, SamplingConfig
from runtime.errors import DamagedRunError, Interrupted, OutputError, RunMismatchError
from tests.generations import read_generations

NUM_ROWS = 6
ROWS = [{"id": f"r{i}", "prompt": f"prompt {i}", "answer": i, "tags": ["a", i]} for i in range(NUM_ROWS)]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A model and a run that it has begun, in a folder that a test may spoil."""

    root: Path
    file: str = "in.jsonl"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def data(self) -> Path:
        return self.root / self.file

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(path=self.root / "generate" / "case")

    def start(self, should_stop: Callable[[], bool] = lambda: False) -> Outcome:
        return generate(self.config, should_stop)

    @property
    def config(self) -> GenerateConfig:
        return GenerateConfig(
            run="case",
            output_root=str(self.root),
            model=ModelConfig(name="hf", path=str(self.model)),
            dataset=DatasetConfig(kind=DatasetKind.jsonl, path=str(self.data), id_field="id"),
            policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=1),
            sampling=SamplingConfig(max_new_tokens=4),
        )

    def edit(self, file: str, **values: object) -> None:
        path = self.model / file
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | values))

    def write_rows(self, rows: Sequence[Mapping[str, object]]) -> None:
        self.data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def written(self) -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in self.run.path.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Stopped when a part was there."""
    place = Place(root=tmp_path_factory.mktemp("begun"))
    shutil.copytree(Runtime(RuntimeConfig()).model.checkpoint.path, place.model)
    place.write_rows(ROWS)
    with pytest.raises(Interrupted):
        place.start(lambda: place.run.generations_part(0).exists())
    return place


@pytest.fixture
def place(begun: Place, tmp_path: Path) -> Place:
    shutil.copytree(begun.root, tmp_path, dirs_exist_ok=True)
    return Place(root=tmp_path)


def edit(file: str, **values: object) -> Callable[[Place], None]:
    return lambda place: place.edit(file, **values)


def write(file: str, text: str) -> Callable[[Place], None]:
    def act(place: Place) -> None:
        (place.model / file).write_text(text)

    return act


CHANGES = [
    (edit("config.json", rms_norm_eps=0.5), "config.json rms_norm_eps: 1e-06 -> 0.5"),
    (
        edit("config.json", rope_parameters={"rope_type": "default", "rope_theta": 5.0}),
        "config.json rope_parameters.rope_theta: 10000.0 -> 5.0",
    ),
    (edit("config.json", hidden_act="relu"), 'config.json hidden_act: "silu" -> "relu"'),
    (edit("generation_config.json", eos_token_id=[5, 2]), "generation_config.json eos_token_id: [2] -> [2,5]"),
    (write("chat_template.jinja", "{{ messages }}"), 'chat_template: "{% for'),
    (
        edit("tokenizer_config.json", clean_up_tokenization_spaces=True),
        "tokenizer_config.json clean_up_tokenization_spaces: false -> true",
    ),
    (edit("adapter_config.json", r=8), "adapter_config.json r: (absent) -> 8"),
]


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize(("change", "line"), CHANGES, ids=[line.partition(":")[0] for _, line in CHANGES])
def test_a_changed_file_of_the_model_is_refused_by_file_and_key(
    place: Place, change: Callable[[Place], None], line: str
) -> None:
    change(place)
    before = place.written()
    with pytest.raises(RunMismatchError) as refused:
        place.start()
    assert line in str(refused.value)
    assert str(place.model) in str(refused.value)
    assert refused.value.exit_code == 2
    assert place.written() == before


def with_row(place: int, **values: object) -> list[dict[str, object]]:
    return [*ROWS[:place], ROWS[place] | values, *ROWS[place + 1 :]]


INPUTS = {
    "a value of a column": (with_row(3, answer=777), 'input column "answer": "int64 ', 'number 3, id "r3": a passed'),
    "a value in a list": (with_row(5, tags=["b", 5]), 'input column "tags": "string ', 'number 5, id "r5": a passed'),
    "a type": ([row | {"answer": f"s{row['id']}"} for row in ROWS], '-> "string ', 'number 0, id "r0": a passed'),
    "a type of a later row": (with_row(4, answer=0.5), '-> "double ', 'number 4, id "r4"'),
    "a new column": ([row | {"new": 1} for row in ROWS], 'input column "new": (absent) -> ', 'number 0, id "r0"'),
    "a column gone": ([{k: v for k, v in row.items() if k != "tags"} for row in ROWS], "-> (absent)", 'id "r0"'),
    "their order": ([dict(reversed(row.items())) for row in ROWS], "input columns: [", 'number 0, id "r0"'),
    "a prompt": (with_row(2, prompt="another"), 'input: "', 'number 2, id "r2": its prompt or settings'),
    "a row more": ([*ROWS, ROWS[0] | {"id": "new"}], 'input: "', "The run has 6 rows, the input 7"),
}


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("case", INPUTS)
def test_a_changed_input_is_refused_by_column_and_row_and_nothing_is_made_again(place: Place, case: str) -> None:
    rows, line, first_row = INPUTS[case]
    place.write_rows(rows)
    before = place.written()
    with pytest.raises(RunMismatchError) as refused:
        place.start()
    message = str(refused.value)
    assert line in message
    assert first_row in message
    assert f"(from {place.data})" in message
    assert place.written() == before


def test_the_same_rows_elsewhere_are_the_same_input(place: Place) -> None:
    text = place.data.read_text().replace('"answer": 1', '"answer":  1') + "\n\n"
    place.data.write_text(text)
    assert place.start().exit_code == 0


def test_without_its_digests_of_rows_a_run_is_refused_without_the_row(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.write_rows(with_row(3, answer=777))
    place.run.row_digests.write_bytes(b"torn")
    with pytest.raises(RunMismatchError, match='input column "answer"'):
        place.start()
    assert "the changed row is unknown" in caplog.text
    place.run.row_digests.unlink()
    with pytest.raises(RunMismatchError, match='input column "answer"'):
        place.start()


def test_a_finished_run_is_not_that_of_a_changed_model(place: Place) -> None:
    assert place.start().exit_code == 0
    assert place.start().was_finished
    place.edit("config.json", rms_norm_eps=0.5)
    with pytest.raises(RunMismatchError, match=r"config\.json rms_norm_eps: 1e-06 -> 0\.5"):
        place.start()


def test_a_run_is_finished_only_with_its_summary(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OutputError("no room")

    monkeypatch.setattr(generation, "write_summary", fail)
    with pytest.raises(OutputError):
        place.start()
    assert not place.run.success.exists()
    monkeypatch.undo()
    assert not place.start().was_finished
    assert place.run.summary.exists()
    assert place.run.success.exists()


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_lost_plan_is_computed_again_and_no_part_is_made_again(place: Place, is_finished: bool) -> None:
    if is_finished:
        place.start()
    before = {path: path.read_bytes() for path in place.run.generations.iterdir()}
    plan = place.run.plan.read_bytes()
    place.run.plan.unlink()
    assert place.start().exit_code == 0
    assert place.run.plan.read_bytes() == plan
    assert {path: path.read_bytes() for path in before} == before
    assert place.start().was_finished


@pytest.mark.parametrize("is_finished", [True, False])
def test_an_edited_plan_needs_a_person(place: Place, is_finished: bool) -> None:
    if is_finished:
        place.start()
    table = pq.ParquetFile(place.run.plan).read()
    pq.write_table(table.set_column(0, table.schema.field(0), pa.array(["x"] * NUM_ROWS)), place.run.plan)
    with pytest.raises(DamagedRunError, match=r"plan\.parquet .* was changed after it was written"):
        place.start()


def _spoil_a_row(place: Place, name: str) -> None:
    lines = place.data.read_text().splitlines()
    place.data.write_text("\n".join([*lines[:4], name, *lines[5:]]))


def test_a_bad_row_keeps_its_id_in_a_renamed_file_with_blank_lines(place: Place) -> None:
    shutil.rmtree(place.run.path)
    _spoil_a_row(place, "{broken")
    assert place.start().exit_code == 3
    assert "bad-row-4" in read_generations(place.run)["id"].to_pylist()
    renamed = replace(place, file="renamed.jsonl")
    renamed.data.write_text("\n" + place.data.read_text())
    assert renamed.start().was_finished


def test_a_model_that_only_moved_goes_on(place: Place, begun: Place) -> None:
    assert place.model != begun.model
    assert place.start().summary.rows["ok"] == NUM_ROWS
