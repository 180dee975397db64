"""The storage formats, one or a few related ones per module. `registry.py` imports all modules of this folder.

A module defines `FORMATS`. It also defines `METHODS` if a checkpoint's config names the format (`quant_method`), or if
stored tensors have other names than the model's weight. Code for several formats belongs one folder up.
"""
