"""Measurements of this machine, for predictions and for machine profiles: disk, memory, matrix products, attention and
whole layers. All probes (named measurements, see `timing.py`) belong here."""
