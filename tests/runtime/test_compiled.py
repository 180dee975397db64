"""What is kept of compiled kernels on disk is taken while all that they are made of is as it was, and not longer."""

import importlib
import shutil
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from numba import config
from numba.core.caching import InTreeCacheLocator

from runtime import cache_root, errors
from runtime.kernels import arguments, compiled

PLACES = "CACHE_LOCATOR_CLASSES"
PART = """
from numba import njit

@njit
def part(x):
    return x + {added}
"""
KERNEL = """
from .compiled import cached_kernel
from .folder.part import part

@cached_kernel
def kernel(x):
    return 10 * part(x)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels of its own beside a copy of `compiled`; a kernel in one file is made of a part in another."""
    folder = tmp_path / "own_runtime" / "kernels"
    (folder / "folder").mkdir(parents=True)
    for module in (compiled, arguments):
        shutil.copy(str(module.__file__), folder)
    for module in (cache_root, errors):
        shutil.copy(str(module.__file__), folder.parent)
    (folder / "kernel.py").write_text(KERNEL)
    (folder / "folder" / "part.py").write_text(PART.format(added=1))
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def loaded_anew(package: Path) -> ModuleType:
    """The kernel's module as a new process would have it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package.parent.name]:
        del sys.modules[name]
    importlib.invalidate_caches()
    return importlib.import_module(f"{package.parent.name}.kernels.kernel")


def result(module: ModuleType) -> tuple[int, bool]:
    """What the kernel makes of 4, and whether it was compiled for that."""
    return module.kernel(4), bool(module.kernel.stats.cache_misses)


def test_a_kernel_is_compiled_anew_when_a_part_in_another_file_has_changed(package: Path) -> None:
    assert result(loaded_anew(package)) == (50, True)
    assert result(loaded_anew(package)) == (50, False)
    # Of another length: Python takes bytecode for fresh by the second and the size of its source.
    (package / "folder" / "part.py").write_text(PART.format(added=2) + "# changed\n")
    assert result(loaded_anew(package)) == (60, True)
    assert result(loaded_anew(package)) == (60, False)


def test_the_first_compilation_of_a_process_is_said_and_what_is_kept_is_not(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_shown in (1, 0):
        kernel, said = loaded_anew(package).kernel, list[str]()
        log = SimpleNamespace(info=lambda text, *values, said=said: said.append(text % values))
        monkeypatch.setattr(sys.modules[f"{package.parent.name}.kernels.compiled"], "log", log)
        assert (kernel(4), kernel(0.5)) == (50, 15)
        assert [text.partition(",")[0] for text in said] == ["compiling kernels for this processor"] * num_shown


def test_other_functions_are_kept_where_their_owners_say(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, PLACES, "InTreeCacheLocator")
    loaded_anew(package)
    assert getattr(config, PLACES) == "InTreeCacheLocator"


@pytest.fixture
def in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache, where neither the user names a place nor the one beside the source can be written."""
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setattr(InTreeCacheLocator, "ensure_cache_path", refused)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weightstream" / "kernels"


def refused(_: object) -> None:
    raise PermissionError("read-only")


def test_kernels_in_the_users_cache_are_for_the_user_alone(package: Path, in_the_users_cache: Path) -> None:
    kernel = loaded_anew(package).kernel
    assert Path(kernel._cache.cache_path).parent == in_the_users_cache
    assert cache_root.is_private(in_the_users_cache)


def test_kernels_are_not_taken_from_a_folder_that_others_can_write_and_no_later_start_is_promised(
    package: Path, in_the_users_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_users_cache.mkdir(parents=True)
    in_the_users_cache.chmod(0o775)
    kernel, said = loaded_anew(package).kernel, list[str]()
    log = SimpleNamespace(info=lambda text, *values: said.append(text % values))
    monkeypatch.setattr(sys.modules[f"{package.parent.name}.kernels.compiled"], "log", log)
    assert kernel(4) == 50
    assert list(in_the_users_cache.iterdir()) == []
    assert [text.partition("; ")[2] for text in said] == ["not cached: no writable cache directory"]


def begun(package: Path) -> "subprocess.Popen[str]":
    """A process that has the kernel at hand and calls it when it is told to; it says whether it compiled it."""
    program = (
        f"from {package.parent.name}.kernels.kernel import kernel; print('ready', flush=True); input(); "
        "print(kernel(4), sum(kernel.stats.cache_misses.values()))"
    )
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True, cwd=package.parents[1])


def test_of_processes_that_begin_together_one_compiles_and_the_others_take_it(package: Path) -> None:
    with ExitStack() as stack:
        processes = [stack.enter_context(begun(package)) for _ in range(3)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        said = sorted(process.communicate()[0].strip() for process in processes)
    assert said == ["50 0", "50 0", "50 1"]


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LOCK_TIMEOUT_SECONDS", 0.0)
    path = tmp_path / "kernel.lock"
    program = (
        f"from runtime.kernels import compiled as c; print(c._acquire_lock(c.Path({str(path)!r})), flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() != "None\n"
        assert compiled._acquire_lock(path) is None
        holder.kill()
    assert compiled._acquire_lock(path) is not None


def test_where_no_lock_can_be_had_each_process_compiles(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded_anew(package)

    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(sys.modules[f"{package.parent.name}.kernels.compiled"], "flock", refuse)
    assert result(module) == (50, True)
    assert result(loaded_anew(package)) == (50, False)


def test_code_of_other_sources_is_not_taken_where_a_process_ended_while_it_kept_its_own(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert result(loaded_anew(package)) == (50, True)
    (package / "folder" / "part.py").write_text(PART.format(added=2) + "# changed\n")
    module = loaded_anew(package)

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(module.kernel._cache._cache_file, "_save_data", end)
        module.kernel(4)
    assert result(loaded_anew(package)) == (60, True)


def test_only_what_is_kept_is_loaded_where_nothing_else_is_asked_for(package: Path) -> None:
    for is_kept in (False, True):
        module = loaded_anew(package)
        parts = sys.modules[f"{package.parent.name}.kernels.compiled"]
        with parts.cached_kernels_only():
            if is_kept:
                assert module.kernel(4) == 50
            else:
                with pytest.raises(parts.KernelNotCached, match="kernel"):
                    module.kernel(4)
        assert result(module) == (50, not is_kept)
