"""The proportions of the code: lengths as medians, no crumbs without a reason, docstrings that are sentences."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from .test_imports import ROOT, imports, sources, tree

# Lengths in lines at the median and at the 90th percentile: what the code has, and a little air.
MOST_LINES = {"modules": (120, 230), "functions": (7, 18), "modules of tests": (125, 230)}
FUNCTION_LINES = 50  # outside of `runtime/kernels`, where a compiler wants a loop nest in one piece
CRUMB_LINES = 45
WHY_ALONE = "stands alone"  # how a crumb's docstring begins to say why it is not a part of its importer

# Words that begin an answer to a question that the reader has not asked.
NO_SUBJECT = re.compile(
    "(Of|By|As|With|Without|At|Also|And|Or|From|To|Until|Since|For|On|In|Into|Per|None|Not|Nothing|Beside|Before|After"
    "|Behind|Under|Over|Through)\\b"
)

MODULES = [module for module, path in sources().items() if path.name != "__init__.py"]
TESTS = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "__init__.py"]


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(module)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


@cache
def lengths(kind: str) -> dict[str, int]:
    if kind == "functions":
        return {f"{module}.{one.name}:{one.lineno}": lines_of(one) for module in MODULES for one in functions(module)}
    paths = TESTS if kind == "modules of tests" else [sources()[module] for module in MODULES]
    return {path.relative_to(ROOT).as_posix(): num_lines(path) for path in paths}


@cache
def importers(module: str) -> frozenset[str]:
    return frozenset(other for other in sources() if other != module and module in imports(other))


def docstrings(module: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring of a module, its own first."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def docstring(module: str) -> str:
    return " ".join((ast.get_docstring(tree(module)) or "").split())


def is_crumb(module: str) -> bool:
    return num_lines(sources()[module]) < CRUMB_LINES and len(importers(module)) == 1


@pytest.mark.parametrize("kind", MOST_LINES)
def test_most_code_is_short(kind: str) -> None:
    found = sorted(lengths(kind).items(), key=lambda item: item[1])
    median, nine_in_ten = (found[int(len(found) * share)][1] for share in (0.5, 0.9))
    longest = ", ".join(f"{name} ({num})" for name, num in reversed(found[-12:]))
    assert (median <= MOST_LINES[kind][0], nine_in_ten <= MOST_LINES[kind][1]) == (True, True), (
        f"{kind} have {median} lines at the median and {nine_in_ten} at the 90th percentile, "
        f"{MOST_LINES[kind]} are the most; the longest: {longest}"
    )


def test_no_function_is_long_but_a_kernel() -> None:
    outside = [module for module in MODULES if not module.startswith("runtime.kernels.")]
    found = {f"{module}.{one.name}": lines_of(one) for module in outside for one in functions(module)}
    long = [f"{name} has {num} lines" for name, num in found.items() if num > FUNCTION_LINES]
    assert not long, "\n".join(long)


def test_a_small_module_with_one_importer_says_why_it_stands_alone() -> None:
    silent = [module for module in MODULES if is_crumb(module) and WHY_ALONE not in docstring(module)]
    offending = [f"{module}: {', '.join(importers(module))}" for module in silent]
    assert not offending, "\n".join(offending)


def test_every_folder_says_what_it_is_for() -> None:
    folders = [module for module, path in sources().items() if path.name == "__init__.py"]
    assert [module for module in folders if not docstring(module)] == []


def test_docstrings_have_a_subject() -> None:
    offending = [
        f"{sources()[module].relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for module in sources()
        for line, text in docstrings(module)
        if NO_SUBJECT.match(text)
    ]
    assert not offending, "\n".join(offending)
