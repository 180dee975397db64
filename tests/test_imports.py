"""Who may import whom, and which calls may not be made at all: read from the source, nothing is imported."""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What each part of runtime may import of the others. `plan` is values only, so everyone may use it.
MODEL = {
    "plan",
    "store",
    "stream",
    "cache",
    "attention",
    "kernels",
    "linear",
    "formats",
    "weights",
    "events",
    "probing",
    "checkpoint_source",
}
ALLOWED = {
    "plan": {"batching"},
    "batching": set[str](),
    "trace": set[str](),
    "store": {"plan"},
    "remote": set[str](),
    "stream": {"plan", "store", "trace", "out_of_memory"},
    "kernels": set[str](),
    "attention": {"plan", "stream", "kernels"},
    "cache": {"plan", "stream", "attention"},
    "linear": {"plan", "kernels", "attention", "model"},
    "formats": {"plan", "store", "kernels", "linear"},
    "weights": {"plan", "store", "linear", "formats"},
    "events": set[str](),
    "probing": {"plan", "events", "attention"},
    "foreign": set[str](),
    "synthesize": {"store", "probing", "foreign"},
    "checkpoint_source": {"store", "remote", "synthesize", "foreign", "out_of_memory"},
    "model": MODEL,
    "ranks": {"plan", "store", "stream", "events", "probing", "model"},
    "sequences": {"plan", "attention", "cache", "model"},
    "requests": {"checkpoint_source", "probing", "model", "sequences"},
    "engine": {*MODEL, "model", "ranks", "batching", "sequences", "requests", "trace"},
    "measure": {*MODEL, "model", "batching", "sequences", "engine"},
}
FOR_ALL = {"cache_root", "closing", "config", "errors", "resources", "shared_work", "units"}
# What each room of jobs may import of the others.
JOBS = {
    "files": set[str](),
    "datasets": set[str](),
    "config": {"files", "datasets"},
    "pictures": {"files"},
    "record": {"config", "datasets", "files"},
    "tracking": {"config", "files", "record"},
    "workers": {"config", "files", "record"},
    "run": {"config", "files", "datasets", "exporting", "pictures", "record", "tracking", "workers"},
    "evaluating": {"config", "datasets", "files", "record", "run", "tracking"},
    "exporting": {"datasets", "files", "record"},
    "serving": {"config", "datasets", "files", "record", "exporting", "run"},
    "reporting": {"config", "datasets", "files", "pictures", "record", "run"},
    "planning": {"config", "datasets", "files", "pictures"},
    "measuring": {"config", "files"},
    "grading": {"exporting", "files", "record"},
    "packing": {"files"},
    "tables": {"config", "datasets", "record", "run"},
}
PURE = ("plan", "batching")

# What the callers of `runtime/kernels` may import of it; the rest is how these are made.
SEAM = {
    *("compiler", "compiled", "arguments", "linear", "packed", "attention", "attention_quantized", "rowwise"),
    *("amx.linear", "amx.attention", "device_matrices"),
}

# The rooms of `runtime/plan`: each may import of those before it; the modules beside them compose all.
PLAN = ("shape", "schedule", "placement", "cost", "search")
HEAVY = {"torch", "transformers", "datasets", "safetensors", "greenlet"}


@cache
def sources() -> dict[str, Path]:
    """Every module of the packages by its dotted name; a package by the name of its folder."""
    files = [path for package in ("runtime", "jobs") for path in sorted((ROOT / package).rglob("*.py"))]
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in files}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): path for path, p in parts.items()}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text(encoding="utf-8"))


@cache
def imports(module: str) -> frozenset[str]:
    """Dotted names that `module` imports anywhere, in functions too; relative ones made absolute."""
    package = module.split(".") if sources()[module].name == "__init__.py" else module.split(".")[:-1]
    names: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names |= {
                f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in sources() else origin for alias in node.names
            }
    return frozenset(names)


def top_level(names: frozenset[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@cache
def calls(module: str) -> list[tuple[str, ast.Call]]:
    """Each call, behind what it calls."""
    return [(ast.unparse(node.func), node) for node in ast.walk(tree(module)) if isinstance(node, ast.Call)]


MODULES = sorted(sources())
RUNTIME = [module for module in MODULES if module.partition(".")[0] == "runtime"]
IN_ROOMS = [module for module in MODULES if module.startswith(tuple(f"jobs.{room}." for room in JOBS))]


def test_the_rules_see_the_project() -> None:
    assert {"runtime.errors", "runtime.plan", "jobs.config.settings", "jobs.datasets.config"} <= set(MODULES)
    assert "runtime.errors" in imports("runtime.config.settings")
    assert "jobs.datasets.config" in imports("jobs.config.settings")


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports in functions and those for type checkers alone count: they only hide a circle."""
    try:
        TopologicalSorter({module: imports(module) & set(MODULES) - {module} for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def offending(modules: Iterable[str], wrong: Callable[[str], Iterable[object]]) -> dict[str, list[str]]:
    """What `wrong` finds in each module, where it finds something. A test for each module would cost more than all
    that it does."""
    found = {module: sorted(map(str, wrong(module))) for module in modules}
    return {module: names for module, names in found.items() if names}


def test_runtime_knows_neither_jobs_nor_hydra() -> None:
    assert offending(RUNTIME, lambda module: top_level(imports(module)) & {"jobs", "conf", "hydra", "omegaconf"}) == {}


def test_a_room_of_the_jobs_imports_only_what_it_may() -> None:
    def wrong(module: str) -> set[str]:
        rooms = {".".join(name.split(".")[1:2]) for name in imports(module) if name.startswith("jobs.")}
        return rooms - JOBS[module.split(".")[1]] - {module.split(".")[1]}

    assert offending(IN_ROOMS, wrong) == {}


def test_only_jobs_bench_imports_benchmarks() -> None:
    """They and the training of the bundled model are no part of what users install."""
    others = set(MODULES) - {"jobs.bench"}
    assert offending(others, lambda module: top_level(imports(module)) & {"benchmarks", "scripts"}) == {}


def test_only_job_files_import_hydra() -> None:
    others = [module for module in MODULES if sources()[module].parent != ROOT / "jobs"]
    assert offending(others, lambda module: top_level(imports(module)) & {"hydra"}) == {}


def test_only_the_settings_import_omegaconf() -> None:
    others = set(MODULES) - {"jobs.config.settings"}
    assert offending(others, lambda module: top_level(imports(module)) & {"omegaconf"}) == {}


def test_parts_of_runtime_import_only_what_lies_below_them() -> None:
    def wrong(module: str) -> set[str]:
        part = module.split(".")[1]
        used = {name.split(".")[1] for name in imports(module) if name.startswith("runtime.")}
        return used - ALLOWED[part] - FOR_ALL - {part}

    inside = [module for module in RUNTIME if module.split(".")[1:2] and module.split(".")[1] in ALLOWED]
    assert offending(inside, wrong) == {}  # the top of the package may use all of it


def test_kernels_are_reached_by_their_seam() -> None:
    def wrong(module: str) -> set[str]:
        kernels = (name for name in imports(module) if name.startswith("runtime.kernels"))
        return {name.removeprefix("runtime.kernels.") for name in kernels} - SEAM

    assert offending([module for module in RUNTIME if not module.startswith("runtime.kernels")], wrong) == {}


def test_what_all_may_import_imports_nothing_but_its_like() -> None:
    allowed = {f"runtime.{name}" for name in FOR_ALL}

    def wrong(module: str) -> set[str]:
        names = imports(module)
        strangers = top_level(names) - {"runtime"} - set(sys.stdlib_module_names)
        return {name for name in names if name.startswith("runtime")} - allowed | strangers

    assert offending(allowed, wrong) == {}


def plan_floor(module: str) -> int:
    """0 for the lowest room of the plan; above all rooms for what composes them."""
    room = module.split(".")[2:3]
    return PLAN.index(room[0]) if room and room[0] in PLAN else len(PLAN)


def test_a_room_of_the_plan_imports_only_rooms_before_it() -> None:
    def wrong(module: str) -> set[str]:
        used = {name for name in imports(module) if name.startswith("runtime.plan.")}
        return {name for name in used if plan_floor(name) > plan_floor(module)}

    assert offending([module for module in RUNTIME if module.startswith("runtime.plan.")], wrong) == {}


@pytest.mark.parametrize("part", PURE)
def test_deciding_code_imports_only_values(part: str) -> None:
    modules = [module for module in RUNTIME if module.split(".")[1:2] == [part]]
    foreign = {name for module in modules for name in top_level(imports(module))} - {"runtime"}
    assert foreign - {"numpy"} <= set(sys.stdlib_module_names) - {"threading", "socket", "subprocess", "time"}


def test_deciding_code_loads_no_torch_not_even_by_its_package() -> None:
    modules = [module for module in RUNTIME if module.split(".")[1:2] in [[part] for part in PURE]]
    program = f"import sys, {', '.join(modules)}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == []


def test_nothing_loads_pickles_or_remote_code() -> None:
    loading = {"torch.load", "eval", "exec", "hydra.utils.instantiate", "instantiate"}

    def wrong(module: str) -> set[str]:
        found = top_level(imports(module)) & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
        for called, call in calls(module):
            found |= {called} & loading
            found |= {"trust_remote_code"} & {str(keyword.arg) for keyword in call.keywords}
        return found

    assert offending(MODULES, wrong) == {}


def test_only_the_command_line_prints() -> None:
    others = {*RUNTIME, *IN_ROOMS} - {"jobs.config.cli"}
    assert offending(others, lambda module: {call.lineno for called, call in calls(module) if called == "print"}) == {}


def test_what_a_run_has_written_is_read_without_torch() -> None:
    """Not even what prints, exports, grades and reports it, nor the start of a run that may turn out finished."""
    rooms = ("jobs.record", "jobs.datasets", "jobs.exporting", "jobs.grading", "jobs.reporting", "jobs.run.command")
    modules = [module for module in MODULES if module.startswith(rooms)]
    program = f"import sys, {', '.join(modules)}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == []


def test_a_room_has_at_most_25_files() -> None:
    """One with more has several trades, and its listing tells no story."""
    rooms = Counter(str(path.parent.relative_to(ROOT)) for path in sources().values())
    assert {room: count for room, count in rooms.items() if count > 25} == {}


def test_each_class_has_a_name_of_its_own() -> None:
    places = defaultdict[str, list[str]](list)
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
