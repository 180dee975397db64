"""Docstrings of the code: each folder says what it is for, and each docstring begins with its subject."""

import ast
import re
from collections.abc import Iterator

from .test_imports import ROOT, sources, tree

# Words that begin an answer to a question that the reader has not asked.
NO_SUBJECT = re.compile(
    "(Of|By|As|With|Without|At|Also|And|Or|From|To|Until|Since|For|On|In|Into|Per|None|Not|Nothing|Beside|Before|After"
    "|Behind|Under|Over|Through)\\b"
)


def docstrings(module: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring of a module, its own first."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def docstring(module: str) -> str:
    return " ".join((ast.get_docstring(tree(module)) or "").split())


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
