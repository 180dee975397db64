"""The tests of kernels pass for each instruction set that this processor has, whichever it would take by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.kernels import compiled
from runtime.measure.machine_cache import isa

TABLE = (
    *("coded_rows", "fused", "host_attention", "linear_backends", "outputs", "published_products"),
    *("quantized_attention", "tile_attention", "tile_products", "vector_products", "window4"),
)
LESS_OR_SAME = {"avx2": ("avx2", "avx512", "amx"), "avx512": ("avx512", "amx"), "amx": ("amx",)}


@pytest.fixture(autouse=True)
def anew() -> None:
    compiled.features.cache_clear()


@pytest.mark.slow("runtime/test_vector_products.py::test_products_are_as_precise_as_in_float32")
@pytest.mark.parametrize("wanted", LESS_OR_SAME)
def test_kernels_pass_their_tests_for_it(wanted: str) -> None:
    if isa() not in LESS_OR_SAME[wanted]:
        pytest.skip(f"this processor has {isa()}, and no {wanted}")
    files = [f"tests/runtime/test_{name}.py" for name in TABLE]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", *files]
    environment = {**os.environ, "WEIGHTSTREAM_ISA": wanted}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


def test_less_than_the_processor_has_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_it = {"avx2": True, "fma": True, "avx512f": True, "avx512bf16": True, "amx-bf16": True}
    monkeypatch.setattr(compiled.binding, "get_host_cpu_features", lambda: all_of_it)
    monkeypatch.delenv(compiled.ISA_VARIABLE, raising=False)
    assert compiled.features() == all_of_it
    assert not compiled.has_fma_without_avx512()
    for wanted, kept in {"avx2": 2, "avx512": 4, "amx": 5}.items():
        compiled.features.cache_clear()
        monkeypatch.setenv(compiled.ISA_VARIABLE, wanted)
        assert sum(compiled.features().values()) == kept
        assert compiled.has_fma_without_avx512() == (wanted == "avx2")


@pytest.mark.parametrize(("wanted", "message"), [("avx1024", "can be avx2"), ("amx", "no amx-bf16; unset")])
def test_what_is_unknown_or_not_there_is_refused(wanted: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.binding, "get_host_cpu_features", lambda: {"avx2": True, "avx512f": True})
    monkeypatch.setenv(compiled.ISA_VARIABLE, wanted)
    with pytest.raises(ConfigError, match=message):
        compiled.features()
