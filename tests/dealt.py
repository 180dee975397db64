"""A few cases of a parametrised test: they show each value of its parameters, or each pair, or are some of these."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

import pytest


def dealt(cases: Sequence[Sequence[object]], by: int = 1) -> list[int]:
    """Positions of a few of `cases`, each a value for each parameter: every value (by its repr) that occurs in them
    occurs in the few as well, and with `by` = 2 every pair of values. Greedy: the case with most that is missing; among
    several the one whose values were taken least often, so that the values of each parameter take turns."""
    values = [[*enumerate(map(repr, case))] for case in cases]
    shown = [{*combinations(case, by)} for case in values]
    missing, taken, indexes = {each for case in shown for each in case}, Counter[object](), list[int]()
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(shown[i] & missing), -sum(taken[each] for each in values[i])))
        taken.update(values[best])
        missing -= shown[best]
        indexes.append(best)
    return sorted(indexes)


def spread(places: Sequence[int], most: int) -> list[int]:
    """At most so many of `places`, first and last among them, at equal distances."""
    last = len(places) - 1
    return [places[round(turn * last / max(1, most - 1))] for turn in range(most)] if most <= last else [*places]


def deal(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves of each test with the marker `dealt` the cases that it asks for, and of others all. Slow cases stay:
    another option leaves them out."""
    groups = dict[str, list[pytest.Function]]()
    for item in items:
        marks = (item.get_closest_marker("dealt"), item.get_closest_marker("slow"))
        if isinstance(item, pytest.Function) and marks[0] and not marks[1]:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    others = set[pytest.Item]()
    for group in groups.values():
        marker = group[0].get_closest_marker("dealt")
        assert marker is not None
        names = marker.args or [*group[0].callspec.params]
        cases = [[item.callspec.params[name] for name in names] for item in group]
        shown = dealt(cases, marker.kwargs.get("by", 1))
        selected = {*spread(shown, marker.kwargs.get("most", len(shown)))}
        others |= {item for position, item in enumerate(group) if position not in selected}
    if others:
        config.hook.pytest_deselected(items=[*others])
        items[:] = [item for item in items if item not in others]


def with_slow_others(cases: Iterable[object], quick: Collection[object]) -> list[object]:
    """`cases` for `parametrize`, of which `make test` runs those in `quick` alone."""
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
        for case in cases
    ]
