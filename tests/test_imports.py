"""Who may import whom, and which calls may not be made at all: read from the source, nothing is imported."""

import ast
import subprocess
import sys
from collections.abc import Iterator
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
    "origin",
}
ALLOWED = {
    "plan": {"batching"},
    "batching": set[str](),
    "trace": set[str](),
    "store": {"plan"},
    "remote": set[str](),
    "ranks": set[str](),
    "stream": {"plan", "store", "trace", "ranks", "out_of_memory"},
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
    "origin": {"store", "remote", "synthesize", "foreign", "out_of_memory"},
    "model": MODEL,
    "engine": {*MODEL, "model", "batching", "ranks", "trace"},
    "measure": {*MODEL, "model", "batching", "engine"},
}
FOR_ALL = {
    *("closing", "config", "errors", "orders", "profiles", "resources", "sampling_config", "shared_work", "text_field"),
    *("units", "urls"),
}
# What each room of jobs may import of the others. Nothing but a door imports benchmarks.
JOBS = {
    "files": set[str](),
    "datasets": set[str](),
    "config": {"files", "datasets"},
    "pictures": {"files"},
    "run": {"config", "files", "datasets", "pictures"},
    "evaluating": {"config", "datasets", "files", "run"},
    "exporting": {"datasets", "files", "run"},
    "serving": {"config", "datasets", "files", "run", "exporting"},
    "reporting": {"config", "files", "pictures", "run"},
    "planning": {"config", "files", "pictures"},
    "measuring": {"config", "files"},
    "benchmarks": {"config", "files", "datasets", "evaluating", "packing", "pictures", "run"},
    "grading": {"exporting", "files", "run"},
    "packing": {"files"},
    "tables": {"config", "datasets", "run"},
    "training": set[str](),
}
PURE = ("plan", "batching")

# What the callers of `runtime/kernels` may import of it; the rest is how these are made.
SEAM = {
    *("compiler", "arguments", "linear", "packed", "attention", "attention_quantized", "rowwise"),
    *("amx.linear", "amx.attention", "amx.scratch"),
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


def calls(module: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree(module)) if isinstance(node, ast.Call))


MODULES = sorted(sources())
RUNTIME = [module for module in MODULES if module.partition(".")[0] == "runtime"]
IN_ROOMS = [module for module in MODULES if module.startswith(tuple(f"jobs.{room}." for room in JOBS))]


def test_the_rules_see_the_project() -> None:
    assert {"runtime.errors", "runtime.plan", "jobs.config.settings", "jobs.datasets.config"} <= set(MODULES)
    assert "runtime.errors" in imports("runtime.config")
    assert "jobs.datasets.config" in imports("jobs.config.settings")


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports in functions and those for type checkers alone count: they only hide a circle."""
    try:
        TopologicalSorter({module: imports(module) & set(MODULES) - {module} for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize("module", RUNTIME)
def test_runtime_knows_neither_jobs_nor_hydra(module: str) -> None:
    assert not top_level(imports(module)) & {"jobs", "conf", "hydra", "omegaconf"}


@pytest.mark.parametrize("module", IN_ROOMS)
def test_a_room_of_the_jobs_imports_only_what_it_may(module: str) -> None:
    rooms = {".".join(name.split(".")[1:2]) for name in imports(module) if name.startswith("jobs.")}
    assert rooms <= JOBS[module.split(".")[1]] | {module.split(".")[1]}


@pytest.mark.parametrize("module", [module for module in MODULES if module not in IN_ROOMS])
def test_only_the_door_of_benchmarks_imports_them(module: str) -> None:
    assert module == "jobs.bench" or not {name for name in imports(module) if name.startswith("jobs.benchmarks")}


@pytest.mark.parametrize("module", MODULES)
def test_only_job_files_import_hydra(module: str) -> None:
    is_job_file = sources()[module].parent == ROOT / "jobs"
    assert is_job_file or "hydra" not in top_level(imports(module))


@pytest.mark.parametrize("module", MODULES)
def test_only_the_settings_import_omegaconf(module: str) -> None:
    assert module == "jobs.config.settings" or "omegaconf" not in top_level(imports(module))


@pytest.mark.parametrize("module", RUNTIME)
def test_parts_of_runtime_import_only_what_lies_below_them(module: str) -> None:
    part = module.split(".")[1] if "." in module else ""
    if part not in ALLOWED:
        return  # the top of the package may use all of it
    used = {name.split(".")[1] for name in imports(module) if name.startswith("runtime.")}
    assert used <= ALLOWED[part] | FOR_ALL | {part}


@pytest.mark.parametrize("module", [module for module in RUNTIME if not module.startswith("runtime.kernels")])
def test_kernels_are_reached_by_their_seam(module: str) -> None:
    inside = {name.removeprefix("runtime.kernels.") for name in imports(module) if name.startswith("runtime.kernels")}
    assert inside <= SEAM


@pytest.mark.parametrize("module", sorted(f"runtime.{name}" for name in FOR_ALL))
def test_what_all_may_import_imports_nothing_but_its_like(module: str) -> None:
    names = imports(module)
    assert {name for name in names if name.startswith("runtime")} <= {f"runtime.{name}" for name in FOR_ALL}
    assert top_level(names) - {"runtime"} <= set(sys.stdlib_module_names)


def plan_floor(module: str) -> int:
    """0 for the lowest room of the plan; above all rooms for what composes them."""
    room = module.split(".")[2:3]
    return PLAN.index(room[0]) if room and room[0] in PLAN else len(PLAN)


@pytest.mark.parametrize("module", [module for module in RUNTIME if module.startswith("runtime.plan.")])
def test_a_room_of_the_plan_imports_only_rooms_before_it(module: str) -> None:
    above = {name for name in imports(module) if name.startswith("runtime.plan.")}
    assert not {name for name in above if plan_floor(name) > plan_floor(module)}


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


@pytest.mark.parametrize("module", MODULES)
def test_nothing_loads_pickles_or_remote_code(module: str) -> None:
    assert not top_level(imports(module)) & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    for call in calls(module):
        assert ast.unparse(call.func) not in {"torch.load", "eval", "exec", "hydra.utils.instantiate", "instantiate"}
        assert "trust_remote_code" not in {keyword.arg for keyword in call.keywords}


@pytest.mark.parametrize("module", [*RUNTIME, *IN_ROOMS])
def test_only_the_command_line_prints(module: str) -> None:
    prints = [call.lineno for call in calls(module) if ast.unparse(call.func) == "print"]
    assert module == "jobs.config.cli" or not prints
