"""Attention over cached keys and values, on an accelerator and on the CPU, and the positions of a pass in the cache."""
