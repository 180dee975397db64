"""Kernels in Triton for weights as they are stored, on an accelerator: whole matrices decoded in one launch, and
products that decode inside. Importing a module of this package imports Triton, so callers import them where they launch
them; `linear/device_codes.py` does, and says which way can be taken.
"""
