"""What ends a completion, and what a decoder begins with, is found where transformers' generate finds it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from runtime import SamplingConfig
from runtime.checkpoint_source.generation_config import GenerationDefaults, read_generation
from runtime.errors import CheckpointError
from runtime.sequences.sequence import Completion, FinishReason
from tests.runtime.sampling_support import References, runtime_for
from tests.support import Reference

ABSENT = object()


@pytest.fixture
def told(reference: References, tmp_path: Path) -> Callable[[object, object], Path]:
    """A copy of a model whose generation_config.json and config.json name these ends; `ABSENT`: no file, no key."""

    def make(in_file: object, in_config: object) -> Path:
        made = tmp_path / "model"
        shutil.copytree(reference("llama").directory, made)
        values = json.loads((made / "config.json").read_text())
        values.pop("eos_token_id", None)
        (made / "config.json").write_text(
            json.dumps(values | ({} if in_config is ABSENT else {"eos_token_id": in_config}))
        )
        (made / "generation_config.json").unlink(missing_ok=True)
        if in_file is not ABSENT:
            (made / "generation_config.json").write_text(json.dumps({"eos_token_id": in_file}))
        return made

    return make


@pytest.mark.parametrize(
    ("in_file", "in_config", "expected"),
    [
        ([5, 9], 7, {5, 9}),
        (5, 7, {5}),
        (None, 7, set()),
        (ABSENT, 7, {7}),
        (ABSENT, [7, 8], {7, 8}),
        (ABSENT, ABSENT, set()),
    ],
)  # fmt: skip
def test_every_end_that_the_checkpoint_names_is_one_and_no_other(
    in_file: object, in_config: object, expected: set[int], told: Callable[[object, object], Path]
) -> None:
    path = told(in_file, in_config)
    theirs = AutoModelForCausalLM.from_pretrained(path).generation_config.eos_token_id
    assert {*(theirs if isinstance(theirs, list) else [] if theirs is None else [theirs])} == expected
    assert read_generation(path, AutoConfig.from_pretrained(path)).eos_token_ids == expected


def test_a_completion_ends_at_the_first_and_at_the_last_of_several_ends(
    reference: References, told: Callable[[object, object], Path]
) -> None:
    plain = reference("llama")
    ends = [plain.expected[0][2], plain.expected[1][3], plain.expected[2][1]]
    ref = Reference(directory=told(ends, 7), prompts=plain.prompts, expected=plain.expected, sampled=plain.sampled)
    results = runtime_for(ref, SamplingConfig(max_new_tokens=7)).generate(ref.prompts[:3])
    for result, full in zip(results, plain.expected, strict=False):
        assert isinstance(result, Completion)
        place = next(place for place, token in enumerate(full) if token in ends)
        assert (list(result.token_ids), result.finish) == (full[: place + 1], FinishReason.eos)


@pytest.mark.parametrize("eos", ["abc", 1.5, [5, "x"], {"a": 1}])
def test_an_end_that_is_no_token_id_is_refused(eos: object) -> None:
    said = GenerationDefaults(source=Path("generation_config.json"), values={"eos_token_id": eos})
    with pytest.raises(CheckpointError, match="eos_token_id must be a token id or a list of them"):
        _ = said.eos_token_ids
