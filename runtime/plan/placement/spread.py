"""Layers that are treated otherwise than the rest lie evenly over the depth."""


def spread(num_layers: int, num_chosen: int) -> tuple[int, ...]:
    """Positions of `num_chosen` of `num_layers`: each resident one buys time to bring the next one in."""
    return tuple(int((turn + 0.5) * num_layers / num_chosen) for turn in range(num_chosen))
