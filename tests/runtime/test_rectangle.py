"""The memory of a padded lane: rows move up in place, with all that they hold."""

import torch

from runtime.cache.rectangle import ReservedLayer
from runtime.stream.device import ComputeDevice


def test_rows_that_stay_move_up_with_every_position_and_go_on() -> None:
    layer, states = ReservedLayer(8, ComputeDevice("cpu")), torch.arange(4 * 2 * 5 * 3.0).view(4, 2, 5, 3)
    layer.update(states, -states)
    kept = [1, 3]
    layer.reorder_cache(torch.tensor(kept))
    more = torch.full((2, 2, 1, 3), 99.0)
    keys, values = layer.update(more, -more)
    assert torch.equal(keys, torch.cat([states[kept], more], dim=2))
    assert torch.equal(values, -keys)
