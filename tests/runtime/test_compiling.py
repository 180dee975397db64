"""The first start on a host: a run that is done sooner begins without compiled kernels, others wait for processes that
compile them. What is compiled is stood in for, as slow as a test wants it."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import Runtime, RuntimeConfig
from runtime.config.settings import ModelConfig
from runtime.engine import compiling
from runtime.engine.compiling import CompiledKernels, KernelSet, estimate_plain_seconds
from runtime.errors import Interrupted
from runtime.kernels import compiler
from runtime.kernels.compiler import has_compiler
from tests.toy import toy_shape

PART = KernelSet("products", "float32", ("bfloat16",))
PROMPTS = ["Q: What is 94 + 78?", "Q: Spell the word old."]


class Compiled:
    """What `prepare` was asked for, since nothing was on disk."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def prepare(self, part: KernelSet) -> None:
        assert has_compiler(), "kernels are prepared while they are held back"
        self.parts.append(part.kind)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Nothing is on disk, in a process that has taken no kernels up; compiling takes 5 s."""
    found = Compiled()
    for name in ("_disabled", "_enabled_permanently"):
        monkeypatch.setattr(compiler, name, threading.Event())
    monkeypatch.setattr(compiling, "_load_if_cached", lambda part: False)
    monkeypatch.setattr(compiling, "prepare_kernels", found.prepare)
    monkeypatch.setattr(compiling, "_split_work", lambda parts: [])
    monkeypatch.setattr(compiling, "COMPILING_SECONDS", 5.0)
    return found


def opened() -> Runtime:
    return Runtime(RuntimeConfig(model=ModelConfig(name="tiny")))


def texts(runtime: Runtime) -> list[str]:
    return [result.text for result in runtime.generate(PROMPTS)]


def test_a_short_run_begins_without_kernels_and_a_later_one_with_them(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_load_if_cached", lambda part: True)
    with opened() as runtime:
        shape, expected = runtime.model.shape, texts(runtime)
    assert shape.has_decode_kernel
    monkeypatch.setattr(compiling, "_load_if_cached", lambda part: False)
    with opened() as runtime:
        assert texts(runtime) == expected
        assert compiled.parts == []
        assert not has_compiler()
        assert not runtime.model.shape.has_decode_kernel
        assert not runtime.model.shape.has_fused_gates
        monkeypatch.setattr(compiling, "COMPILING_SECONDS", 0.0)
        assert texts(runtime) == expected
        assert sorted(compiled.parts) == ["attention", "host_ops", "products"]
        assert has_compiler()
        assert runtime.model.shape == shape


def test_a_plan_of_plain_operators_counts_their_memory(compiled: Compiled) -> None:
    with opened() as runtime:
        made = [runtime.request(str(index), prompt) for index, prompt in enumerate(PROMPTS)]
        with runtime.open_with_backoff(made) as (without, _):  # pyright: ignore[reportArgumentType] - none is rejected
            pass
        runtime.wait_for_kernels()
        with runtime.open_with_backoff(made) as (having, _):  # pyright: ignore[reportArgumentType]
            pass
    needed = [sum(entry.num_bytes for entry in plan.placement.ledgers[0].entries) for plan in (without, having)]
    assert needed[0] > needed[1]


def test_short_calls_that_take_long_together_wait_in_the_end(compiled: Compiled) -> None:
    kernels = CompiledKernels([PART])
    assert [kernels.use_plain_operators(2.0) for _ in range(3)] == [True, True, False]
    kernels.wait(lambda: False)
    assert compiled.parts == ["products"]
    assert not kernels.use_plain_operators(0.0)


def test_a_process_that_has_taken_kernels_up_never_goes_back(compiled: Compiled) -> None:
    CompiledKernels([PART]).wait(lambda: False)
    assert not CompiledKernels([PART]).use_plain_operators(0.0)
    assert has_compiler()


def test_what_is_on_disk_is_asked_for_while_another_runtime_goes_without(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CompiledKernels([PART]).use_plain_operators(0.0)
    asked = list[bool]()
    monkeypatch.setattr(compiling, "_load_if_cached", lambda part: asked.append(has_compiler()) or True)
    assert CompiledKernels([PART]).are_ready
    assert asked == [True]
    assert not has_compiler()


def test_a_larger_model_and_more_tokens_take_longer() -> None:
    small, large = toy_shape(), toy_shape(20_000)
    assert (
        estimate_plain_seconds(small, [100])
        < estimate_plain_seconds(large, [100])
        < estimate_plain_seconds(large, [100] * 2)
    )
    assert estimate_plain_seconds(small, [64] * 40) < 8 < estimate_plain_seconds(large, [64])


@pytest.fixture
def process_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """`process_does(script)`: so does a process that is to compile."""

    def set_to(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        monkeypatch.setattr(compiling, "_split_work", lambda parts: [parts] if parts else [])

    return set_to


def test_a_process_that_fails_is_no_error(compiled: Compiled, process_does: Callable[[str], None]) -> None:
    process_does("exit 1")
    kernels = CompiledKernels([PART])
    kernels.wait(lambda: False)
    assert compiled.parts == ["products"]
    assert kernels.are_ready


def test_a_stop_ends_the_wait_and_the_process(compiled: Compiled, process_does: Callable[[str], None]) -> None:
    process_does("exec sleep 60")
    kernels = CompiledKernels([PART])
    kernels.begin()
    (process,) = kernels._processes
    assert not kernels.use_plain_operators(0.0)
    with pytest.raises(Interrupted):
        kernels.wait(lambda: True)
    assert process.poll() is not None
    assert compiled.parts == []


def test_a_process_ends_with_the_one_that_began_it() -> None:
    command = [sys.executable, "-P", "-m", "runtime.engine.compiling", '[["no such part", "float32"]]']
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 1


def test_a_wait_has_an_end_and_says_how_far_it_is(
    compiled: Compiled,
    process_does: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(compiling, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(compiling, "LOG_SECONDS", 0.02)
    process_does("exec sleep 60")
    begin = time.monotonic()
    with caplog.at_level("INFO"):
        CompiledKernels([PART]).wait(lambda: False)
    assert "compiling kernels: 0 s, 0 of 1 processes done" in caplog.text
    assert compiled.parts == ["products"]
    assert time.monotonic() - begin < 50
