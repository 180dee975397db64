"""With model.verify=full a run is bound to every byte of its weights."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.record.run_dir import RunDirectory
from jobs.record.summary import Outcome
from jobs.run.tasks.generate import generate
from runtime import Runtime, RuntimeConfig
from runtime.config.settings import ModelConfig, PolicyConfig, PolicyKind, SamplingConfig, Verify
from runtime.errors import Interrupted, RunMismatchError
from runtime.store.checkpoint import SINGLE
from tests.support import flip_outside_samples


@dataclass(frozen=True, kw_only=True)
class Place:
    root: Path

    @property
    def weights(self) -> Path:
        return self.root / "model" / SINGLE

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(path=self.root / "generate" / "case")

    def start(self, verify: Verify, should_stop: Callable[[], bool] = lambda: False) -> Outcome:
        config = GenerateConfig(
            run="case",
            output_root=str(self.root),
            model=ModelConfig(name="hf", path=str(self.weights.parent), verify=verify),
            dataset=DatasetConfig(kind=DatasetKind.jsonl, path=str(self.root / "in.jsonl"), id_field="id"),
            policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=1),
            sampling=SamplingConfig(max_new_tokens=2),
        )
        return generate(config, should_stop)

    def begin(self, verify: Verify) -> None:
        with pytest.raises(Interrupted):
            self.start(verify, self.run.generations_part(0).exists)

    def flip(self) -> None:
        flip_outside_samples(self.weights)

    def written(self) -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in self.run.path.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(root=tmp_path)
    shutil.copytree(Runtime(RuntimeConfig()).model.checkpoint.path, place.weights.parent)
    rows = [{"id": f"r{i}", "prompt": f"prompt {i}"} for i in range(4)]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return place


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_bit_flipped_outside_the_samples_is_refused_by_file(place: Place, is_finished: bool) -> None:
    place.begin(Verify.full)
    if is_finished:
        assert place.start(Verify.full).exit_code == 0
    before = place.written()
    place.flip()
    with pytest.raises(RunMismatchError) as refused:
        place.start(Verify.full)
    assert f'{SINGLE} sha256: "' in str(refused.value)
    assert f"(from {place.weights})" in str(refused.value)
    assert refused.value.exit_code == 2
    assert place.written() == before
    place.flip()  # back
    assert place.start(Verify.full).was_finished == is_finished


def test_sampled_bytes_do_not_show_it(place: Place) -> None:
    place.begin(Verify.sampled)
    place.flip()
    assert place.start(Verify.sampled).exit_code == 0
    assert place.start(Verify.sampled).was_finished


@pytest.mark.slow("jobs/test_verify.py::test_a_bit_flipped_outside_the_samples_is_refused_by_file")
def test_a_run_that_was_begun_with_all_bytes_is_not_gone_on_with_by_samples(place: Place) -> None:
    place.begin(Verify.full)
    with pytest.raises(RunMismatchError, match=rf"{SINGLE} sha256: .* -> \(absent\)  \(from .*model\.verify=full"):
        place.start(Verify.sampled)
    assert place.start(Verify.full).exit_code == 0


def test_what_was_not_recorded_cannot_be_checked_and_that_is_said(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.begin(Verify.sampled)
    assert place.start(Verify.full).exit_code == 0
    said = "model.verify=sampled: .*cannot be"
    assert [record for record in caplog.records if re.search(said, record.getMessage())]
    assert place.start(Verify.sampled).was_finished
