"""Kernels on stored matrices compiled for cards that are not here: `test_device_kernels.py` runs these in a process of
their own. Triton is given a driver that knows no more than which card to compile for; nothing runs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from runtime.kernels import device_matrices as matrices
from runtime.linear import device_codes
from tests.runtime.stored_rows import CPU, MAKERS

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}  # a block's at most, by compute capability
IN_SHORT = ("gptq", "awq", "int4-groups of 64", "mxfp4-pack-quantized", "window4", "GGUF's Q6_K")


class Driver:
    def __init__(self, capability: int):
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class Compiled:
    """The module of kernels, which compiles what it would launch."""

    def __init__(self) -> None:
        self.made = list[tuple[str, Any]]()

    def __getattr__(self, name: str) -> Any:
        kernel, made = getattr(matrices, name), self.made

        class Grid:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *args, **options: made.append((name, kernel.warmup(*args, grid=grid, **options)))

        return Grid()


@pytest.mark.parametrize(
    ("capability", "name"),
    [(80, name) for name in MAKERS] + [(other, name) for other in (89, 90, 120) for name in IN_SHORT],
)
def test_numbers_keep_their_rounding_and_tiles_fit(
    capability: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A multiplication and an addition that became one instruction, or subnormals that became 0, would be other
    numbers."""
    driver.set_active(Driver(capability))
    compiled, rows = Compiled(), MAKERS[name]((192, 448), tmp_path, CPU)
    monkeypatch.setattr(device_codes, "_kernels", lambda: compiled)
    codes = rows.codes()
    assert codes is not None
    device_codes.decode(codes, torch.empty(rows.shape, dtype=torch.bfloat16))
    if name != "window4":
        for num_rows in (1, 64, 500):
            device_codes.multiply(torch.empty(num_rows, rows.shape[1], dtype=torch.bfloat16), codes)
        device_codes.multiply(torch.empty(500, rows.shape[1]), codes)
        ends = torch.zeros(4, dtype=torch.int32)
        device_codes.multiply_groups(torch.empty(100, rows.shape[1], dtype=torch.float16), codes, 4, ends)
    for kernel, made in compiled.made:
        assert made.metadata.shared <= SHARED_BYTES[capability], kernel
        assert not re.search(r"\.ftz", made.asm["ptx"]), kernel
        if kernel == "decode":
            assert not re.search(r"\bfma\.", made.asm["ptx"])
