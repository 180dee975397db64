"""Typed, frozen, validated settings of a run: a dataclass per Hydra group, sampling, machine profiles, schedule orders.
Only values and their checks belong here; imports nothing but errors."""
