"""NaN and infinity: a row's error names where they began, and a model that gives nothing else stops the run."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from runtime import SamplingConfig
from runtime.config.settings import DType
from runtime.errors import BrokenModelError
from runtime.sequences.sequence import Completion, FinishReason
from tests.runtime.sampling_support import References, runtime_for
from tests.support import Reference


def spoiled(ref: Reference, directory: Path, tensor: str, value: float, row: int | None) -> Reference:
    shutil.copytree(ref.directory, directory)
    for file in directory.glob("*.safetensors"):
        weights = load_file(file)
        if tensor in weights:
            weights[tensor][slice(None) if row is None else row] = value
            save_file(weights, file, {"format": "pt"})
            return Reference(directory=directory, prompts=ref.prompts, expected=ref.expected, sampled=ref.sampled)
    raise AssertionError(f"no {tensor}")


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(
    ("family", "tensor", "module", "value"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", "model.layers.1", float("nan")),
        ("llama", "model.norm.weight", "model.norm", float("inf")),
        ("bloom", "transformer.h.1.mlp.dense_h_to_4h.weight", "transformer.h.1", float("nan")),
        ("t5", "encoder.block.1.layer.1.DenseReluDense.wo.weight", "encoder.block.1", float("nan")),
    ],
)
def test_a_model_that_gives_no_finite_number_stops_the_run_and_names_layer_and_tensor(
    family: str, tensor: str, module: str, value: float, reference: References, tmp_path: Path
) -> None:
    ref = spoiled(reference(family), tmp_path / "model", tensor, value, None)
    with pytest.raises(BrokenModelError) as stopped:
        runtime_for(ref, SamplingConfig(max_new_tokens=3)).generate(ref.prompts)
    with pytest.raises(BrokenModelError):
        runtime_for(ref, SamplingConfig(max_new_tokens=3), chunk_tokens=7).generate(ref.prompts)
    assert f"first in the output of {module}, whose weights {tensor} hold NaN" in str(stopped.value)
    assert stopped.value.exit_code == 4


def test_numbers_too_large_for_float16_are_told_as_such(reference: References, tmp_path: Path) -> None:
    """As `model.dtype=auto` may come to it, where a checkpoint in bfloat16 meets a device without units for that."""
    ref = spoiled(reference("llama"), tmp_path / "model", "model.layers.1.mlp.down_proj.weight", 6e4, None)
    sampling = SamplingConfig(max_new_tokens=2, ignore_eos=True)
    with pytest.raises(BrokenModelError, match=r"model\.layers\.1; float16 overflows above 65,504: set model\.dtype"):
        runtime_for(ref, sampling, dtype=DType.float16).generate(ref.prompts)
    results = runtime_for(ref, sampling).generate(ref.prompts)
    assert all(isinstance(result, Completion) and result.error is None for result in results)


def test_one_poisoned_embedding_costs_the_rows_that_use_it_and_their_errors_name_it(
    reference: References, tmp_path: Path
) -> None:
    plain, name = reference("llama"), "model.embed_tokens"
    token = next(t for t in plain.prompts[1] if sum(t in prompt for prompt in plain.prompts) == 1)
    untouched = [n for n, full in enumerate(plain.expected) if n != 1 and token not in full]
    assert len(untouched) > 3
    ref = spoiled(plain, tmp_path / "model", f"{name}.weight", float("nan"), token)
    results = runtime_for(ref, SamplingConfig(max_new_tokens=7, ignore_eos=True)).generate(ref.prompts)
    broken = results[1]
    assert isinstance(broken, Completion)
    assert broken.finish is FinishReason.error
    assert f"in the output of {name}, whose weights {name}.weight hold NaN" in (broken.error or "")
    for n in untouched:
        healthy = results[n]
        assert isinstance(healthy, Completion)
        assert list(healthy.token_ids) == plain.expected[n]


def test_a_row_alone_in_its_pass_stops_the_run_for_a_broken_layer_but_not_for_its_own_tokens(
    reference: References, tmp_path: Path
) -> None:
    ref, sampling = reference("llama"), SamplingConfig(max_new_tokens=2)
    layer = spoiled(ref, tmp_path / "layer", "model.layers.0.mlp.up_proj.weight", float("nan"), None)
    with pytest.raises(BrokenModelError, match="all 1 rows of a pass have failed"):
        runtime_for(layer, sampling).generate(ref.prompts[:1])
    own = spoiled(ref, tmp_path / "own", "model.embed_tokens.weight", float("nan"), ref.prompts[0][0])
    (alone,) = runtime_for(own, sampling).generate(ref.prompts[:1])
    assert isinstance(alone, Completion)
    assert alone.finish is FinishReason.error


def test_a_healthy_run_makes_no_second_pass(reference: References, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was looked into")

    monkeypatch.setattr("runtime.engine.nonfinite.NonFiniteProbe.explain", never)
    ref = reference("llama")
    results = runtime_for(ref, SamplingConfig(max_new_tokens=2)).generate(ref.prompts)
    assert all(isinstance(result, Completion) and result.error is None for result in results)


def test_beams_of_one_broken_prompt_end_together_and_leave_others_alone(reference: References, tmp_path: Path) -> None:
    ref, sampling = reference("llama"), SamplingConfig(num_beams=3, n=2, max_new_tokens=3, ignore_eos=True)
    own = spoiled(ref, tmp_path / "own", "model.embed_tokens.weight", float("nan"), ref.prompts[0][0])
    prompts = [prompt for prompt in ref.prompts if ref.prompts[0][0] not in prompt or prompt is ref.prompts[0]]
    broken, other, *healthy = runtime_for(own, sampling).generate(prompts)
    assert all("in the output of model.embed_tokens" in (each.error or "") for each in (broken, other))
    assert len(healthy) == 2 * (len(prompts) - 1) > 0
    assert all(isinstance(each, Completion) and each.error is None for each in healthy)
    (alone, _) = runtime_for(own, sampling).generate(prompts[:1])
    assert alone.finish is FinishReason.error
