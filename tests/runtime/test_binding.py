"""Weights lie in a module's places while any lane is inside it, and no longer."""

import pytest
import torch
from greenlet import getcurrent, greenlet

from runtime.model.stages import Binding


class Parking(torch.nn.Module):
    """A product, a stop, another product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2, bias=False, device="meta")
        self.register_buffer("scale", torch.ones(1, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        parent = getcurrent().parent
        assert parent is not None
        parent.switch()
        return self.first(x) * self.scale


WEIGHTS = {"first.weight": torch.eye(2) * 2, "scale": torch.full((1,), 3.0)}


def lanes_inside(module: Parking, num_lanes: int) -> list[greenlet]:
    binding = Binding(module, list(WEIGHTS))

    def forward() -> torch.Tensor:
        with binding.bound(WEIGHTS):
            return module(torch.ones(1, 2))

    lanes = [greenlet(forward) for _ in range(num_lanes)]
    for lane in lanes:
        lane.switch()
    return lanes


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_lanes_that_park_inside_keep_their_weights_in_whatever_order_they_leave(order: tuple[int, ...]) -> None:
    module = Parking()
    lanes = lanes_inside(module, 3)
    for lane in order:
        assert torch.equal(lanes[lane].switch(), torch.full((1, 2), 12.0))
    assert module.first.weight.is_meta
    assert module.get_buffer("scale").is_meta


def test_a_lane_that_fails_inside_leaves_no_weights_behind() -> None:
    module = Parking()
    (lane,) = lanes_inside(module, 1)
    with pytest.raises(RuntimeError, match="stop"):
        lane.throw(RuntimeError("stop"))
    assert module.first.weight.is_meta
