"""Which bytes of a checkpoint are which parameter: layouts, conversions, and formats such as GGUF, FP8 and MXFP4.
Here belongs what turns a slot full of bytes into the arguments of a module.
"""
