"""Isolated peers, with fakes in the place of their libraries, and what becomes of a worker that goes wrong."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks import runner
from benchmarks.contenders import CONTENDERS, Contender, Isolation, Peer
from benchmarks.measure import measure
from benchmarks.runner import run_measurement
from benchmarks.task import BenchmarkTask, Result
from runtime.checkpoint_source.location import find_checkpoint
from runtime.config.settings import ModelConfig
from runtime.errors import WeightstreamError
from runtime.units import MIB

TASK = BenchmarkTask(
    contender="vllm", path="somewhere", num_prompts=3, prompt_tokens=30, num_new_tokens=3, ignore_eos=True,
    batch_size=2, micro_batch_size=2, num_micro_batches=1, weight_share=1.0, num_threads=2,
)  # fmt: skip
ANSWER = """
import os
def answers(question):
    print("chatter")
    os.write(1, b"chatter of a library")
    yield dict(seconds=1.0, prefill_seconds=0.0, rate=float(os.environ["OMP_NUM_THREADS"]), peak_bytes=0,
               baseline_bytes=0, bytes_read=0, policy=os.environ["LD_PRELOAD"], tokens=[[question["num_prompts"]]])
"""
FAILING = """
import sys
sys.stderr.write("Traceback ...\\n[rank0]: OSError: no such kernel\\nWARNING: shutting down\\n")
sys.exit(1)
"""
HANGING = """
import pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
pathlib.Path(__file__).with_suffix(".pid").write_text(str(child.pid))
time.sleep(60)
"""


def asked_of(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch, task: BenchmarkTask = TASK) -> Result:
    """What `program` answers in the place of vLLM's module."""
    (folder / "fake_peer.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(runner, "install_environment", lambda isolation: Path(sys.executable))
    isolation = Isolation(name="fake", module="fake_peer", requirements=(), preloaded=("libnone.so",))
    fake = Peer(batch_sizes=(), isolation=isolation)
    monkeypatch.setitem(CONTENDERS, Contender.vllm, fake)  # pyright: ignore[reportArgumentType]
    return run_measurement(task)


def test_an_isolated_peer_gets_the_task_its_threads_and_libraries_and_answers_in_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = asked_of(ANSWER, tmp_path, monkeypatch)
    assert (found.tokens, found.rate) == ([[3]], 2.0)
    assert found.policy == str(Path(sys.executable).parent.parent / "lib" / "libnone.so")


def test_an_isolated_peer_that_fails_says_its_error_and_not_what_it_said_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WeightstreamError, match=r"vllm failed with exit code 1: \[rank0\]: OSError: no such kernel$"):
        asked_of(FAILING, tmp_path, monkeypatch)


def test_an_isolated_peer_that_a_signal_ends_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeightstreamError, match="vllm was killed by SIGABRT"):
        asked_of("import os; os.abort()", tmp_path, monkeypatch)


def test_an_isolated_peer_past_its_limit_ends_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WeightstreamError, match=r"vllm took longer than peer_minutes=0\.05"):
        asked_of(HANGING, tmp_path, monkeypatch, replace(TASK, limit_minutes=0.05))
    child = int((tmp_path / "fake_peer.pid").read_text())
    assert is_gone(child)


def test_a_sigterm_ends_the_worker_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "fake_peer.pid"

    def stop_us() -> None:
        while not said.exists() or not said.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=stop_us, daemon=True).start()
    with pytest.raises(SystemExit, match="143"):
        asked_of(HANGING, tmp_path, monkeypatch)
    assert is_gone(int(said.read_text()))


def test_the_worker_of_llama_cpp_needs_nothing_that_its_environment_lacks() -> None:
    missing = ("torch", "transformers", "safetensors", "omegaconf", "pyarrow", "numba", "greenlet")
    program = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))"
    program += "; import benchmarks.worker, benchmarks.peers.llama_cpp_python"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr


def is_gone(process: int) -> bool:
    for _ in range(50):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # nobody has asked for its exit code yet
            return True
        time.sleep(0.05)
    return False


def tiny(contender: Contender) -> BenchmarkTask:
    return replace(TASK, contender=contender.value, path=str(find_checkpoint(ModelConfig(), None)))


def test_airllm_gets_the_same_ids_and_leaves_nothing_beside_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def load(path: str, *, device: str, dtype: torch.dtype, layer_shards_saving_path: str) -> SimpleNamespace:
        folders.append(Path(layer_shards_saving_path))
        (folders[0] / "layer.safetensors").write_bytes(bytes(8))
        assert device == "cpu"
        return SimpleNamespace(model=AutoModelForCausalLM.from_pretrained(path, dtype=dtype))

    fake = ModuleType("airllm")
    fake.AutoModel = SimpleNamespace(from_pretrained=load)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "airllm", fake)
    from benchmarks.peers import air_llm

    task = tiny(Contender.airllm)
    assert air_llm.generate(task).tokens == measure(replace(task, contender="transformers")).tokens
    assert folders[0].parent == Path(task.path).parent
    assert not folders[0].exists()


@pytest.mark.parametrize("contender", [Contender.deepspeed_cpu, Contender.deepspeed_nvme])
def test_deepspeed_is_told_where_parameters_lie_and_buffers_hold_the_largest(
    contender: Contender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[dict] = []
    largest: list[int] = []

    def initialize(*, model: PreTrainedModel, config: dict) -> list[SimpleNamespace]:
        settings.append(config["zero_optimization"])
        largest.append(max(weights.numel() for weights in model.parameters()))
        return [SimpleNamespace(module=model, eval=model.eval)]

    fake = ModuleType("deepspeed")
    fake.initialize = initialize  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    lock = tmp_path / "extensions" / "operator" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    from benchmarks.peers import zero_inference

    monkeypatch.setattr(zero_inference, "deepspeed", fake)
    monkeypatch.setattr(zero_inference, "HfDeepSpeedConfig", lambda config: None)
    task = tiny(contender)
    assert zero_inference.generate(task).tokens == measure(replace(task, contender="transformers")).tokens
    assert not lock.exists()
    place = settings[0]["offload_param"]
    assert settings[0]["stage"] == 3
    assert place["device"] == contender.value.removeprefix("deepspeed_")
    if contender is Contender.deepspeed_nvme:
        assert largest[0] <= place["buffer_size"] < largest[0] + MIB
        assert Path(place["nvme_path"]).parent == Path(task.path).parent
