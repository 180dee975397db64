"""Measurements of this machine, for predictions and for profiles: disk, memory, matrix products, attention and whole
layers. All probes belong here."""
