"""Settings of a run as typed, frozen, validated dataclasses: one per Hydra group, with sampling, machine profiles and
schedule orders. Only values and their checks belong here. Imports only errors from other packages."""
