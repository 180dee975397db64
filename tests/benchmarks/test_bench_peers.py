"""Peers in environments of their own: what they are given, and that one which cannot run stops nobody else."""

import errno
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from benchmarks import runner
from benchmarks.config import BenchConfig
from benchmarks.contenders import Contender, Isolation
from benchmarks.measure import EMPTY_RESULT
from benchmarks.peers import gguf_export
from benchmarks.peers.gguf_export import export_gguf
from benchmarks.runner import install_environment
from benchmarks.suites import run_suite
from benchmarks.task import BenchmarkTask, Result
from runtime.errors import ConfigError, WeightstreamError
from runtime.synthesize.checkpoints import synthesize_checkpoint

gguf = pytest.importorskip("gguf")
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "head_dim": 16,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def exported(folder: Path, model: str, overrides: dict[str, object], kind: str = "F16") -> dict[str, torch.Tensor]:
    """The tensors of the file, as float32."""
    synthesize_checkpoint(model=model, directory=folder / "model", overrides=SMALL | overrides)
    export_gguf(folder / "model", folder / "model.gguf", kind)
    reader = gguf.GGUFReader(folder / "model.gguf")
    return {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in reader.tensors
    }


def stored(folder: Path) -> dict[str, torch.Tensor]:
    files = (folder / "model").glob("*.safetensors")
    return {key: tensor.float() for file in files for key, tensor in load_file(file).items()}


def test_weights_are_the_checkpoints_with_rotary_pairs_side_by_side(tmp_path: Path) -> None:
    found = exported(tmp_path, "llama", {"rope_parameters": LLAMA3})
    weights = {key: tensor.half().float() for key, tensor in stored(tmp_path).items()}
    assert torch.equal(found["blk.1.ffn_down.weight"], weights["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(found["blk.0.attn_v.weight"], weights["model.layers.0.self_attn.v_proj.weight"])
    ours = found["blk.0.attn_q.weight"].view(4, 16, 64)
    theirs = weights["model.layers.0.self_attn.q_proj.weight"].view(4, 16, 64)
    assert torch.equal(ours[:, :4], theirs[:, [0, 8, 1, 9]])


def test_rotary_frequencies_are_divided_as_transformers_divides_them(tmp_path: Path) -> None:
    factors = exported(tmp_path, "llama", {"rope_parameters": LLAMA3})["rope_freqs.weight"]
    config = AutoConfig.from_pretrained(tmp_path / "model")
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain / factors, scaled)
    assert factors.max() == 32


def test_experts_are_stacked(tmp_path: Path) -> None:
    found = exported(tmp_path, "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "Q8_0")
    weights, layer = stored(tmp_path), "model.layers.1.block_sparse_moe.experts"
    for name, matrix in (("ffn_gate_exps", "w1"), ("ffn_down_exps", "w2"), ("ffn_up_exps", "w3")):
        theirs = torch.stack([weights[f"{layer}.{expert}.{matrix}.weight"] for expert in range(4)])
        tolerance = float(theirs.abs().max()) / 100
        torch.testing.assert_close(found[f"blk.1.{name}.weight"], theirs, rtol=0.02, atol=tolerance)


def test_other_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="gpt2"):
        export_gguf(tmp_path, tmp_path / "x.gguf", "F16")


def test_a_file_that_could_not_be_written_whole_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_export, "_quantize", fail)
    with pytest.raises(OSError, match="No space"):
        exported(tmp_path, "llama", {})
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def python_of_ours(folder: Path, **_: object) -> None:
    """An environment with this one's packages; pip takes 4 s to come into a new one."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)


def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(runner.venv, "create", python_of_ours)
    with pytest.raises(WeightstreamError, match=r"pip cannot install .*nowhere\.whl: "):
        install_environment(Isolation(name="x", module="x", requirements=("/nowhere.whl",)))


def test_what_is_not_wanted_goes_before_an_environment_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(runner.venv, "create", lambda folder, **_: folder.mkdir(parents=True))
    monkeypatch.setattr(runner, "_pip", lambda python, isolation, *arguments: asked.append(arguments))
    isolation = Isolation(name="y", module="x.y", requirements=("a==1", "b"), unwanted=("c",))
    assert install_environment(isolation) == install_environment(isolation)
    assert install_environment(isolation).relative_to(tmp_path).parts[2].startswith("y-")
    assert asked == [("install", "a==1", "b"), ("uninstall", "--yes", "c")]


def test_a_peer_that_cannot_run_is_named_and_stops_nobody() -> None:
    calls: list[str] = []

    def measure(task: BenchmarkTask) -> Result:
        calls.append(task.contender + " checked" * task.is_check)
        if task.contender == "llama_cpp_f16":
            raise WeightstreamError("no compiler")
        return Result(
            seconds=2.0, prefill_seconds=1.0, rate=1.0, peak_bytes=2, baseline_bytes=1, bytes_read=0, tokens=[[1]]
        )

    contenders = [Contender.none, Contender.llama_cpp_f16, Contender.transformers]
    config = BenchConfig(contenders=contenders, rounds=2, batch_size=4)
    found = run_suite(config, ["somewhere"], lambda line: None, measure)
    assert calls == ["none checked", "none", "llama_cpp_f16", "transformers", "none", "transformers"]
    assert "llama_cpp_f16 is left out: no compiler" in found.table
    assert "| transformers |" in found.table


def test_a_contender_whose_plan_does_not_fit_is_named_before_anything_is_measured() -> None:
    calls: list[str] = []

    def measure(task: BenchmarkTask) -> Result:
        calls.append(task.contender + " checked" * task.is_check)
        if task.contender == "none":
            assert task.is_check
            raise WeightstreamError("contender none cannot run: 9 GiB > 8 GiB")
        return Result(
            seconds=2.0, prefill_seconds=1.0, rate=1.0, peak_bytes=2, baseline_bytes=1, bytes_read=0, tokens=[[1]]
        )

    config = BenchConfig(contenders=[Contender.nvme, Contender.none, Contender.transformers], rounds=1, batch_size=4)
    found = run_suite(config, ["somewhere"], lambda line: None, measure)
    assert calls == ["nvme checked", "none checked", "nvme", "transformers"]
    assert "none is left out: contender none cannot run: 9 GiB > 8 GiB" in found.table


def test_where_no_contender_can_run_nothing_is_measured() -> None:
    def measure(task: BenchmarkTask) -> Result:
        assert task.is_check
        raise WeightstreamError(f"{task.contender} does not fit")

    config = BenchConfig(contenders=[Contender.nvme, Contender.none])
    with pytest.raises(WeightstreamError, match="no contender can run: nvme does not fit; none does not fit"):
        run_suite(config, ["somewhere"], lambda line: None, measure)


def test_weightstream_itself_must_run() -> None:
    def measure(task: BenchmarkTask) -> Result:
        if not task.is_check:
            raise WeightstreamError("broken")
        return EMPTY_RESULT

    with pytest.raises(WeightstreamError, match="broken"):
        run_suite(BenchConfig(contenders=[Contender.none]), ["somewhere"], lambda line: None, measure)
