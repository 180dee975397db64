import gc
import importlib

import pytest

from jobs.config.process import settled, uncollected
from runtime.stream.host_memory import HEAP_TUNABLE


def test_what_the_user_has_set_stays() -> None:
    found = settled({"HOME": "/root", "GLIBC_TUNABLES": "glibc.malloc.perturb=1", "OMP_WAIT_POLICY": "active"})
    assert found == {
        "HOME": "/root",
        "GLIBC_TUNABLES": f"glibc.malloc.perturb=1:{HEAP_TUNABLE}",
        "OMP_WAIT_POLICY": "active",
    }


def test_openmp_waits_passively_where_nothing_is_said() -> None:
    assert settled({}) == {"GLIBC_TUNABLES": HEAP_TUNABLE, "GOMP_SPINCOUNT": "1000"}


def test_what_is_settled_is_not_settled_again() -> None:
    once = settled({"HOME": "/root"})
    assert settled(once) == once


def test_garbage_is_collected_behind_the_imports_if_it_was_before() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_garbage_is_collected_behind_imports_that_fail() -> None:
    with pytest.raises(ModuleNotFoundError), uncollected():
        importlib.import_module("jobs.none_such")
    assert gc.isenabled()
