"""What `make test` leaves to `make test-all` is shown by something that it runs."""

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from tests.dealt import dealt, spread

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("test_*.py"))


def marks_of(test: ast.FunctionDef) -> Iterator[ast.expr]:
    """Decorators that make all of it slow. Of a parametrised test that has slow cases others are quick."""
    for each in test.decorator_list:
        if ast.unparse(each).startswith("pytest.mark.slow"):
            yield each


def functions_in(file: Path) -> dict[str, ast.FunctionDef]:
    functions = [each for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, ast.FunctionDef)]
    return {each.name: each for each in functions if each.name.startswith("test_")}


def test_a_slow_test_names_a_quick_one_that_shows_most_of_it() -> None:
    """As `pytest.mark.slow("jobs/test_x.py::test_y")`."""
    tests = {str(file.relative_to(TESTS)): functions_in(file) for file in FILES}
    problems = list[str]()
    for file, found in tests.items():
        for name, test in found.items():
            for mark in marks_of(test):
                named = [ast.literal_eval(each) for each in mark.args] if isinstance(mark, ast.Call) else []
                path, _, quick = "".join(named).partition("::")
                if quick not in tests.get(path, {}) or any(marks_of(tests[path][quick])):
                    problems.append(f"{file}:{mark.lineno}: {name} is slow, and names no quick test: {named}")
    assert not problems


def test_few_cases_show_each_value_and_values_take_turns() -> None:
    cases = [*product(range(6), "abc")]
    few = [cases[i] for i in dealt(cases)]
    assert [number for number, _ in few] == [*range(6)]
    assert sorted(letter for _, letter in few) == [*"aabbcc"]


def test_few_cases_show_each_pair_of_values() -> None:
    cases = [case for case in product(range(3), "abc", [[0], [1]]) if case[:2] != (0, "a")]
    few = [cases[i] for i in dealt(cases, by=2)]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert {(repr(case[first]), repr(case[second])) for case in few} == {
            (repr(case[first]), repr(case[second])) for case in cases
        }
    assert len(few) < len(cases)


def test_at_most_so_many_are_spread_from_the_first_to_the_last() -> None:
    assert spread([2, 3, 5, 7, 11], 3) == [2, 5, 11]
    assert spread([2, 3, 5, 7, 11], 2) == [2, 11]
    assert spread([2, 3, 5, 7, 11], 1) == [2]
    assert spread([2, 3], 2) == spread([2, 3], 9) == [2, 3]
