"""Attention over cached keys and values, on an accelerator and on the CPU, and the layout of a pass in the cache."""
