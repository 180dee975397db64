"""Which bytes of a checkpoint are which parameter: layouts, conversions, GGUF's names, and weights that
are rounded while they are read. Here belongs what turns a slot full of bytes into the arguments of a module; how
numbers lie in bytes is said by `formats`.
"""
