"""Checkpoints that the tests synthesise once, and the answers that transformers gives for them."""

import gc
import os
import subprocess
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from transformers import PreTrainedModel

from runtime import Runtime, RuntimeConfig
from runtime.config.profiles import LinearBackend
from runtime.config.settings import ModelConfig
from runtime.engine import compiling
from runtime.engine.compiling import KernelSet
from runtime.linear import backends, work_items
from runtime.linear.window4_rows import WINDOW4
from runtime.measure import layers, timing
from runtime.model import capabilities as traits
from runtime.model import loading
from runtime.model.families import FAMILIES
from runtime.model.loading import LoadedModel
from runtime.plan.cost.calibration import TypicalLoad
from runtime.plan.cost.rates import MachineRates
from runtime.planning import planner as planning
from runtime.requests import chat
from runtime.store.reader import Reader
from runtime.stream.device import ComputeDevice
from tests import unsynced  # noqa: F401 - at its import
from tests.dealt import deal
from tests.forked_chats import FORKED
from tests.freed_slots import freed_slots_are_spoiled
from tests.processes import alone
from tests.support import MANY_EXPERTS, Reference, always, made_once, synthesize

# Modules that wait for most of their time, the longest first.
WAITING = ("test_slurm_cluster", "test_serve", "test_ranks_killed", "test_local_workers", "test_elastic_workers")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Benchmarks are not installed: what tests them is run with all."""
    is_asked_for = config.getoption("--whole") or any("benchmarks" in word for word in config.args)
    return True if collection_path == Path(__file__).parent / "benchmarks" and not is_asked_for else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--product", action="store_true", help="run every combination of settings, not only every pair of them"
    )
    parser.addoption("--whole", action="store_true", help="run every case of the tests that have the marker `dealt`")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and test items stay until the end: the garbage collector need not look through them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What waits for most of its time begins first: other workers compute meanwhile, where at the end they would have
    nothing left to compute."""
    if not config.getoption("--whole"):
        deal(config, items)
    items.sort(key=lambda item: WAITING.index(item.path.stem) if item.path.stem in WAITING else len(WAITING))


@pytest.fixture(scope="module", autouse=True)
def long_lived() -> Iterator[None]:
    """What is there when a module's tests have ended stays until the session ends, such as compiled kernels and classes
    of models: each run calls the garbage collector several times, which otherwise looks through all of it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The built-in tiny model and converted weights go here, also for subprocesses."""
    home = tmp_path_factory.mktemp("cache")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(home)
    yield home
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for what all workers of the session share."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"


@pytest.fixture(scope="session")
def reference(shared_home: Path) -> Callable[[str], Reference]:
    """`reference(family)`: a checkpoint directory with what `transformers.generate` makes of some prompts, made once
    for all workers. Nobody writes there."""
    return cache(lambda family: Reference.shared(FAMILIES[family], shared_home / "families" / family))


@pytest.fixture(scope="session")
def opened() -> Callable[[RuntimeConfig], Runtime]:
    """`opened(config)`: the same runtime for all configs of one model, which is opened once. Valid until the next call
    for that model; the configs must agree in `machine` and `offload.cache_dir`."""
    runtimes: dict[ModelConfig, Runtime] = {}

    def get(config: RuntimeConfig) -> Runtime:
        if config.model not in runtimes:
            runtimes[config.model] = Runtime(config)
        runtimes[config.model].config = config
        return runtimes[config.model]

    return get


Found = TypeVar("Found")


def once_for_each_config(look: Callable[[PreTrainedModel], Found]) -> Callable[[PreTrainedModel], Found]:
    """`look`, which finds out what a class does with a config, called once for each of them."""
    cache: dict[object, Found] = {}

    def of(model: PreTrainedModel) -> Found:
        key = type(model), model.config.to_json_string(use_diff=False), model.dtype
        if key not in cache:
            cache[key] = look(model)
        return cache[key]

    return of


@pytest.fixture(scope="session", autouse=True)
def measured_once() -> Iterator[None]:
    """What the first runtime of a session finds out of a model and of this machine holds for the later ones: its rates
    for all loads, and of fewer passes than a run takes. Whoever tests finding out itself calls it where it is
    defined."""
    rates: dict[object, MachineRates] = {}
    measure_rates = planning.measure_rates

    def rates_of(
        loaded: LoadedModel, reader: Reader, device: ComputeDevice, usual: TypicalLoad, paged: Collection[int]
    ) -> MachineRates:
        key = loaded.fingerprint, loaded.compute_dtype, device.torch_device, type(device), frozenset(paged)
        if key not in rates:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(layers, "MAX_PASSES", 2)
                patch.setattr(layers, "NUM_SINGLE_PASSES", 3)
                patch.setattr(timing, "NUM_REPEATS", 2)
                rates[key] = measure_rates(loaded, reader, device, usual, paged)
        return rates[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "measure_rates", rates_of)
        patch.setattr(loading, "measure_cache", once_for_each_config(loading.measure_cache))
        patch.setattr(loading, "probe_padding", once_for_each_config(loading.probe_padding))
        patch.setattr(traits, "packed_lanes_obstacle", once_for_each_config(traits.packed_lanes_obstacle))
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_once(shared_home: Path) -> None:
    """In a fresh clone workers that begin together would each compile the same kernels, in 2 to 4 s each. They begin
    with different ones, and take from the disk what another one has compiled."""
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not number:
        return
    parts = (
        KernelSet("attention", "float32"),
        KernelSet("products", "float32", ("bfloat16",)),
        KernelSet("products", "float32", ("float32",)),
        KernelSet("products", "float32", (), (WINDOW4,)),
        KernelSet("attention", "bfloat16"),
        KernelSet(compiling.HOST_OPS, "float32"),
    )
    for turn in range(len(parts)):
        place = (turn + int(number)) % len(parts)
        made_once(
            shared_home / "kernels" / str(place),
            lambda home, place=place: alone(compiling.prepare_kernels, parts[place]),
        )


@pytest.fixture(scope="session", autouse=True)
def compiled_apart() -> Iterator[None]:
    """Kernels that are not on disk yet: no run begins without them, and forked processes compile them. Where a process
    compiles a kernel itself, the linker takes functions that it is made of from what was compiled before, and last bits
    may differ from those of whoever loads it: of a test and its child processes, for example."""

    def compile_apart(parts: Sequence[KernelSet]) -> list[Sequence[KernelSet]]:
        for part in parts:
            alone(prepare, part)
        return []

    prepare = compiling.prepare_kernels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "COMPILING_SECONDS", -1.0)
        patch.setattr(compiling, "_split_work", compile_apart)
        yield


@pytest.fixture(scope="session", autouse=True)
def freed_slots() -> Iterator[None]:
    """Every device that is a double spoils them."""
    with freed_slots_are_spoiled():
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_renderers() -> Iterator[None]:
    """Chats are rendered by processes that are forked: each would import transformers again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "subprocess", FORKED)
        yield


@pytest.fixture
def real_renderers(forked_renderers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own, for tests of how a renderer begins and ends."""
    monkeypatch.setattr(chat, "subprocess", subprocess)


@pytest.fixture
def backend_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[LinearBackend], None]:
    """`backend_is(backend)`: so are those of any size multiplied, where it takes them, until the test ends."""
    monkeypatch.setattr(work_items, "MIN_WEIGHTS", 1)
    fastest = backends._fastest
    return lambda backend: monkeypatch.setattr(
        backends, "_fastest", lambda table, x, blocks: fastest(always(backend), x, blocks)
    )


@pytest.fixture(scope="session")
def many_experts(shared_home: Path) -> Callable[[str], Path]:
    """`many_experts(family)`: a checkpoint with as many experts as the published model, made once for all workers.
    Nobody writes there."""

    def get(family: str) -> Path:
        home = shared_home / "many" / family
        return made_once(home, lambda home: synthesize(family, home / "model", **MANY_EXPERTS[family])) / "model"

    return get


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Work on tensors this small is slower on two threads, and `make test` has a process for each core."""
    torch.set_num_threads(1)


@pytest.fixture
def two_threads(one_thread: None) -> None:
    """For tests of what torch's number of threads matters to."""
    torch.set_num_threads(2)
