"""The typed, frozen and validated settings of a run: the dataclasses behind Hydra's groups, sampling, machine profiles,
schedule orders. Only values and their checks belong here; the room imports nothing but errors."""
