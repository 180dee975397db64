"""A benchmark restricted to an instruction set: what each of its processes is told, and what peers make of it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import instruction_sets, runner
from benchmarks.config import BenchConfig, Suite
from benchmarks.contenders import CONTENDERS, LLAMA_CPP, VLLM, Contender, Peer
from benchmarks.instruction_sets import (
    ENVIRONMENTS,
    REQUIRED_FLAGS,
    Isa,
    cmake_arguments,
    restrict_instructions,
    restriction,
)
from benchmarks.peers import llama_cpp_python
from benchmarks.peers.vllm_cpu import LIBRARY, hide_wider_instructions
from benchmarks.report import format_restriction
from benchmarks.runner import install_environment
from benchmarks.suites import run_suite
from benchmarks.task import BenchmarkTask, Result
from runtime.errors import ConfigError
from runtime.kernels import compiled
from tests.benchmarks.test_bench_isolated_peers import TASK

ALL_FLAGS = frozenset(flag for flags in REQUIRED_FLAGS.values() for flag in flags)


@pytest.fixture(autouse=True)
def _any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: ALL_FLAGS)
    monkeypatch.setattr(runner, "cpu_flags", lambda: ALL_FLAGS)
    for name in ENVIRONMENTS[Isa.avx2]:
        monkeypatch.delenv(name, raising=False)


class Started(Exception):
    """A worker would start."""


def environments_of(contender: Contender, isa: Isa | None, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """With what a worker of this contender would start."""
    found: list[Mapping[str, str]] = []

    def start(command: object, *, env: Mapping[str, str], **_: object) -> None:
        found.append(env)
        raise Started

    monkeypatch.setattr(runner.subprocess, "Popen", start)
    monkeypatch.setattr(runner, "install_environment", lambda isolation: Path(sys.executable))
    monkeypatch.setattr(runner, "_export_gguf", lambda checkpoint, kind: checkpoint)
    config = BenchConfig(suite=Suite.speed, contenders=[contender], isa=isa, batch_size=1, num_prompts=1)
    with pytest.raises(Started):
        run_suite(config, ["somewhere"], lambda line: None)
    return found[0]


OURS_AND_PEERS = [Contender.nvme, Contender.transformers, Contender.vllm, Contender.llama_cpp_f16, Contender.plain_read]


@pytest.mark.parametrize("contender", OURS_AND_PEERS)
@pytest.mark.parametrize("isa", Isa)
def test_every_worker_is_told_what_it_may_use(isa: Isa, contender: Contender, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENVIRONMENTS[isa].items() <= environments_of(contender, isa, monkeypatch).items()
    assert not os.environ.keys() & ENVIRONMENTS[isa].keys(), "and nobody later"


def test_without_a_set_no_worker_is_told_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not environments_of(Contender.nvme, None, monkeypatch).keys() & ENVIRONMENTS[Isa.avx2].keys()


def test_workers_that_measure_products_and_reading_are_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str | None] = []

    def measure(task: BenchmarkTask) -> Result:
        told.append(os.environ.get(compiled.ISA_VARIABLE))
        raise Started

    with pytest.raises(Started):
        run_suite(BenchConfig(suite=Suite.floor, isa=Isa.avx2), ["somewhere"], lambda line: None, measure)
    assert told == ["avx2"]


def test_a_set_that_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: frozenset(REQUIRED_FLAGS[Isa.avx2]))
    with restrict_instructions(Isa.avx2):
        assert restriction() is Isa.avx2
    with pytest.raises(ConfigError, match="isa=avx512: this processor lacks avx512f, avx512cd, "):
        run_suite(BenchConfig(isa=Isa.avx512), ["somewhere"], lambda line: None)
    assert restriction() is None


def test_what_stood_in_the_environment_stands_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX")
    with restrict_instructions(Isa.avx2):
        assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX"


def test_kernels_know_the_variable_and_its_values() -> None:
    assert instruction_sets.ISA_VARIABLE == compiled.ISA_VARIABLE
    assert {environment[compiled.ISA_VARIABLE] for environment in ENVIRONMENTS.values()} <= set(
        compiled.EXCLUDED_FEATURES
    )


def test_torch_takes_what_it_is_told(tmp_path: Path) -> None:
    """The variable and its value are torch's own; oneDNN and MKL say nothing of theirs."""
    if (
        "AVX2" not in torch.backends.cpu.get_cpu_capability()
        and "AVX512" not in torch.backends.cpu.get_cpu_capability()
    ):
        pytest.skip("no AVX2")
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    environment = {**os.environ, **ENVIRONMENTS[Isa.avx2]}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "AVX2"


def test_a_build_for_less_has_an_environment_of_its_own_and_no_cached_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], str | None]] = []

    def run(command: list[str], *, env: Mapping[str, str], **_: object) -> SimpleNamespace:
        asked.append((command[4:], env.get("CMAKE_ARGS")))
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    monkeypatch.setattr(runner.venv, "create", lambda folder, **_: folder.mkdir(parents=True))
    monkeypatch.setattr(runner.subprocess, "run", run)
    native, vllm = install_environment(LLAMA_CPP), install_environment(VLLM)
    pythons = {native}
    for isa in Isa:
        with restrict_instructions(isa):
            pythons.add(install_environment(LLAMA_CPP))
            assert install_environment(VLLM) == vllm, "one wheel has libraries for all"
    assert len(pythons) == 3
    builds = [(command, flags) for command, flags in asked if LLAMA_CPP.requirements[0] in command]
    assert ["--no-cache-dir" in command for command, _ in builds] == [False, True, True]
    assert [flags for _, flags in builds] == [
        None, *(" ".join(cmake_arguments(isa, ALL_FLAGS)) for isa in Isa)
    ]  # fmt: skip


def test_llama_cpp_is_built_with_what_the_set_has_and_the_processor_too() -> None:
    narrow = cmake_arguments(Isa.avx2, ALL_FLAGS | {"avx512_vnni"})
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON"} <= set(narrow)
    assert {"-DGGML_AVX512=OFF", "-DGGML_AVX512_VNNI=OFF"} <= set(narrow)
    wide = cmake_arguments(Isa.avx512, ALL_FLAGS | {"avx512_vnni"})
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX512=ON", "-DGGML_AVX512_VNNI=ON", "-DGGML_AVX512_BF16=OFF"} <= set(wide)


def test_a_build_of_llama_cpp_that_uses_more_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = b"CPU : AVX2 = 1 | AVX512 = 1 | REPACK = 1"
    fake = SimpleNamespace(llama_backend_init=lambda: None, llama_print_system_info=lambda: said)
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    with restrict_instructions(Isa.avx2), pytest.raises(RuntimeError, match="not restricted to AVX2"):
        llama_cpp_python.generate(TASK)


def test_vllm_finds_no_more_than_the_set() -> None:
    names = [name for name in vars(torch.cpu) if name.startswith("_is_") and name.endswith("_supported")]

    def found_by(isa: Isa) -> set[str]:
        processor = SimpleNamespace(**dict.fromkeys(names, lambda: True))
        hide_wider_instructions(isa, processor)
        return {name for name in names if getattr(processor, name)()}

    assert found_by(Isa.avx2) == {"_is_avx2_supported"}
    assert found_by(Isa.avx512) == {name for name in names if "amx" not in name}


def test_the_library_that_vllm_has_loaded_is_read_from_the_maps_of_its_process() -> None:
    line = "7f00-7f01 r-xp 00000000 fe:01 77    /env/lib/python3.11/site-packages/vllm/{}.abi3.so\n"
    names = ["_C_AVX2", "fs_io_C", "spinloop"]
    assert LIBRARY.findall("".join(map(line.format, names))) == ["_C_AVX2"]
    assert LIBRARY.findall(line.format("_C")) == ["_C"]


def test_a_table_begins_with_who_is_restricted_by_what() -> None:
    told = format_restriction(
        "a processor, 2 cores",
        Isa.avx2,
        [Contender.nvme, Contender.vllm, Contender.llama_cpp_f16, Contender.llama_cpp_q8_0],
    )
    assert told.startswith("**a processor, 2 cores, restricted to AVX2**: Weightstream by WEIGHTSTREAM_ISA, ")
    assert told.count("llama.cpp by a separate build") == 1
    assert "vLLM by its library for this set" in told
    assert "but not DeepSpeed's" in format_restriction("", Isa.avx2, [Contender.deepspeed_cpu])


def test_every_isolated_peer_that_compiles_says_what_becomes_of_it() -> None:
    isolations = [entry.isolation for entry in CONTENDERS.values() if isinstance(entry, Peer)]
    assert all(
        isolation.restriction_note for isolation in isolations if isolation is not None and isolation.is_built_here
    )
