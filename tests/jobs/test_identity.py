"""A run belongs to one model: whatever of its files is changed between two starts is refused by file and key."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.io.config import GenerateConfig
from jobs.io.dataset import DatasetConfig
from jobs.io.files import json_digest
from jobs.io.generation import Outcome, generate
from jobs.io.run_dir import RunDirectory
from runtime import Runtime, RuntimeConfig
from runtime.config import ModelConfig, PolicyConfig, PolicyKind, SamplingConfig
from runtime.errors import Interrupted, RunMismatchError

NUM_ROWS = 6


@dataclass(frozen=True, kw_only=True)
class Place:
    """A model and a run that it has begun, in a folder that a test may spoil."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(path=self.root / "generate" / "case")

    def start(self, should_stop: Callable[[], bool] = lambda: False) -> Outcome:
        config = GenerateConfig(
            run="case",
            output_root=str(self.root),
            model=ModelConfig(name="hf", path=str(self.model)),
            dataset=DatasetConfig(limit=NUM_ROWS),
            policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=1),
            sampling=SamplingConfig(max_new_tokens=4),
        )
        return generate(config, should_stop)

    def edit(self, file: str, **values: object) -> None:
        path = self.model / file
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | values))

    def written(self) -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in self.run.path.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Stopped when a part was there."""
    place = Place(root=tmp_path_factory.mktemp("begun"))
    shutil.copytree(Runtime(RuntimeConfig()).model.checkpoint.path, place.model)
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


def test_a_finished_run_is_not_that_of_a_changed_model(place: Place) -> None:
    assert place.start().exit_code == 0
    assert place.start().was_finished
    place.edit("config.json", rms_norm_eps=0.5)
    with pytest.raises(RunMismatchError, match=r"config\.json rms_norm_eps: 1e-06 -> 0\.5"):
        place.start()


def test_a_model_that_only_moved_goes_on(place: Place, begun: Place) -> None:
    assert place.model != begun.model
    assert place.start().summary.rows["ok"] == NUM_ROWS


def test_a_run_begun_before_facts_were_recorded_goes_on_with_a_warning(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    stored = json.loads(place.run.manifest.read_text())
    stored |= {"format": 1, "semantic_digest": json_digest(stored["semantic"])}
    assert len(stored.pop("facts")) > 20
    shutil.rmtree(place.run.path)
    place.run.path.mkdir()
    place.run.manifest.write_text(json.dumps(stored))
    part = place.run.generations_part(0)
    with pytest.raises(Interrupted):
        place.start(part.exists)
    before = part.read_bytes()
    assert "did not record config.json" in caplog.text
    assert place.start().exit_code == 0
    assert part.read_bytes() == before
    assert place.start().was_finished
