"""Kernels for stored matrices in an accelerator's memory: their numbers and products are those of torch's operators,
they are launched without a word from the device, and torch's operators remain where they do not work."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.linear import device_codes
from runtime.linear.rows import Rows
from tests.runtime.gpu_support import ON_GPU
from tests.runtime.stored_rows import CPU, MAKERS, OWN, numbers_of, random

HAS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
ROOT = Path(__file__).parents[2]


def skip_where_the_interpreter_is_too_old() -> None:
    if version("triton").startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 does not know numpy 2.4")


def pass_in_a_process(*options: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "no:cacheprovider", *options]
    ended = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


CASES, RUNS, COMPILES = (f"tests/runtime/triton_{part}.py" for part in ("cases", "runs", "compiles"))


@HAS_TRITON
def test_numbers_and_products_in_triton_s_interpreter_are_those_of_torch() -> None:
    """Of `triton_cases.py` those cases that `make test` runs."""
    skip_where_the_interpreter_is_too_old()
    pass_in_a_process(CASES, TRITON_INTERPRET="1")


@HAS_TRITON
@pytest.mark.slow(
    "runtime/test_device_kernels.py::test_numbers_and_products_in_triton_s_interpreter_are_those_of_torch"
)
def test_all_cases_and_runs_in_front_of_a_double_whose_kernels_are_interpreted() -> None:
    skip_where_the_interpreter_is_too_old()
    pass_in_a_process(CASES, RUNS, "--whole", "-m", "not real", TRITON_INTERPRET="1")


@HAS_TRITON
@pytest.mark.slow(
    "runtime/test_device_kernels.py::test_numbers_and_products_in_triton_s_interpreter_are_those_of_torch"
)
def test_kernels_compile_for_cards_that_are_not_here() -> None:
    """All of `triton_compiles.py`."""
    pass_in_a_process(COMPILES, TRITON_INTERPRET="0")


class Recorder:
    """Kernels that do nothing but note that they were launched."""

    def __init__(self) -> None:
        self.launches = list[str]()

    def __getattr__(self, name: str) -> Any:
        class Kernel:
            def __getitem__(_, grid: tuple[int, ...]) -> Any:
                return lambda *_args, **_options: self.launches.append(name)

        return Kernel()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Kernels may be taken on a CPU, and are these."""
    found = Recorder()
    monkeypatch.setattr(device_codes, "_kernels", lambda: found)
    monkeypatch.setattr(device_codes, "_has_triton", lambda: True)
    monkeypatch.setattr(device_codes, "_check_results", {})
    with device_codes.interpreted():
        yield found


@pytest.mark.parametrize("name", OWN)
def test_a_launch_asks_the_device_for_nothing(name: str, recorder: Recorder) -> None:
    """Whoever asked a tensor without numbers for one would hear an error."""
    rows = MAKERS[name]((64, 128), Path(), torch.device("meta"))
    codes = rows.codes()
    assert codes is not None
    device_codes.decode(codes, torch.empty(64, 128, dtype=torch.bfloat16, device="meta"))
    assert recorder.launches == (["decode", "add_escapes"] if name == "window4" else ["decode"])
    if name != "window4":
        x, ends = torch.empty(40, 128, device="meta"), torch.empty(4, dtype=torch.int32, device="meta")
        assert device_codes.multiply(x, codes).shape == (40, 64)
        assert device_codes.multiply_groups(x, codes, 4, ends).shape == (40, 16)
        assert device_codes.grouped_mm(x, torch.empty(4, 128, 48, device="meta"), offs=ends).shape == (40, 48)
        assert recorder.launches[1:] == ["multiply", "multiply_groups", "multiply_groups"]


def test_nothing_is_launched_for_nothing(recorder: Recorder) -> None:
    codes = int8_rows().codes()
    assert codes is not None
    ends = torch.zeros(4, dtype=torch.int32)
    assert device_codes.multiply_groups(torch.empty(0, 64), codes, 4, ends).shape == (0, 2)
    assert device_codes.multiply(torch.empty(0, 64), codes).shape == (0, 8)
    assert device_codes.grouped_mm(torch.empty(0, 64), torch.empty(4, 64, 3), offs=ends).shape == (0, 3)
    assert recorder.launches == []


def int8_rows() -> Rows:
    return MAKERS["int8-rows"]((8, 64), Path(), CPU)


def test_kernels_that_compute_something_else_are_not_taken_and_named_once(
    recorder: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that write nothing leave zeros."""
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: torch.zeros_like(*args, **kwargs))
    with caplog.at_level(logging.WARNING):
        assert not device_codes.can_decode(int8_rows(), torch.bfloat16)
        assert not device_codes.can_decode(int8_rows(), torch.bfloat16)
    (record,) = caplog.records
    assert "to decode" in record.message
    assert "results differ from torch's operators" in record.message


def test_kernels_that_do_not_compile_are_not_taken_and_named_once(
    recorder: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(device_codes, "_kernels", fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not device_codes.can_decode(int8_rows(), torch.bfloat16)
            assert not device_codes.can_multiply(int8_rows(), torch.bfloat16)
            assert not device_codes.can_group(random(3, 64, 8))
    assert [record.message.count("Failed to find C compiler") for record in caplog.records] == [1, 1, 1]


def test_a_cpu_never_takes_them() -> None:
    assert not device_codes.is_available(CPU)
    assert not device_codes.can_decode(int8_rows(), torch.bfloat16)
    assert not device_codes.can_group(random(3, 64, 8))


@pytest.mark.parametrize("name", MAKERS)
def test_what_lies_otherwise_is_known_of_every_format(name: str, tmp_path: Path) -> None:
    codes = MAKERS[name]((64, 128), tmp_path, CPU).codes()
    assert codes is not None
    assert codes.shape[0] == 64


class TestOnADevice:
    pytestmark = ON_GPU

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [(name, torch.bfloat16) for name in MAKERS]
        + [(name, dtype) for name in ("awq", *OWN) for dtype in (torch.float16, torch.float32)],
        ids=str,
    )
    def test_kernels_work_for_every_format(self, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
        rows = MAKERS[name]((192, 448), tmp_path, torch.device("cuda"))
        assert device_codes.can_decode(rows, dtype)
        codes = rows.codes()
        assert codes is not None
        out, expected = torch.empty(rows.shape, dtype=dtype, device="cuda"), numbers_of(rows).to(dtype)
        device_codes.decode(codes, out)
        assert bool(((out == expected) | (out.isnan() & expected.isnan())).all())
        if name != "window4":
            assert device_codes.can_multiply(rows, dtype)
            assert device_codes.can_multiply_groups(rows, dtype)

    @pytest.mark.parametrize("dtype", device_codes.DTYPES, ids=str)
    def test_kernels_multiply_plain_stacks(self, dtype: torch.dtype) -> None:
        assert device_codes.can_group(random(8, 192, 448).to("cuda", dtype).mT)
