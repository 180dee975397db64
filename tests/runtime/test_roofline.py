"""The hierarchical roofline's three roofs, and where they cross."""

import numpy as np
import pytest

from runtime.plan.cost.roofline import Level, first_turning_point, second_turning_point
from runtime.plan.shape.numbers import Floats

CPU = Level(name="host", flops_per_second=1000.0, bytes_per_second=50.0)
DEVICE = Level(name="compute", flops_per_second=60_000.0, bytes_per_second=300.0)
LINK = 10.0


def attainable(
    level: Level, intensity: float | Floats, link_bytes_per_second: float, intensity_across: float | Floats
) -> Floats:
    """FLOP/s at `level` of an operation that also has bytes brought there over a link: the lowest of three roofs."""
    return np.minimum(level.attainable(intensity), link_bytes_per_second * intensity_across)


@pytest.mark.parametrize(
    ("own", "across", "expected"),
    [
        (1000.0, 1e9, 60_000.0),  # compute is the lowest roof
        (2.0, 1e9, 600.0),  # its memory
        (1000.0, 7.0, 70.0),  # the link
    ],
)
def test_the_lowest_of_three_roofs_bounds(own: float, across: float, expected: float) -> None:
    assert attainable(DEVICE, own, LINK, across) == expected


def test_below_p1_the_lower_level_is_faster_and_above_it_the_upper() -> None:
    p1 = first_turning_point(CPU, LINK)
    assert p1 == 100.0
    for intensity, cpu_wins in [(0.5 * p1, True), (0.99 * p1, True), (1.01 * p1, False), (2 * p1, False)]:
        assert (CPU.attainable(intensity) > attainable(DEVICE, 1e9, LINK, intensity)) == cpu_wins


def test_a_link_as_fast_as_the_memory_leaves_nothing_to_the_lower_level() -> None:
    assert first_turning_point(CPU, 50.0) == 0.0


@pytest.mark.parametrize("own", [1.0, 40.0, 200.0, 1e4])
def test_above_p2_the_link_no_longer_bounds(own: float) -> None:
    p2 = second_turning_point(DEVICE, own, LINK)
    assert attainable(DEVICE, own, LINK, p2) == pytest.approx(DEVICE.attainable(own))
    assert attainable(DEVICE, own, LINK, 3 * p2) == pytest.approx(DEVICE.attainable(own))
    assert attainable(DEVICE, own, LINK, 0.5 * p2) == pytest.approx(0.5 * float(DEVICE.attainable(own)))


def test_a_larger_micro_batch_moves_p2_up_to_the_peak_and_no_further() -> None:
    points = [second_turning_point(DEVICE, own, LINK) for own in (50.0, 100.0, 200.0, 400.0)]
    assert points == [1500.0, 3000.0, 6000.0, 6000.0]


def test_roofs_of_many_are_those_of_each() -> None:
    own, across = np.geomspace(0.1, 1e4, 30), np.geomspace(1e5, 1.0, 30)
    together = attainable(DEVICE, own, LINK, across)
    assert list(together) == [float(attainable(DEVICE, o, LINK, a)) for o, a in zip(own, across, strict=True)]
