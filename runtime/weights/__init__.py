"""Maps checkpoint bytes to model parameters: layouts, conversions, GGUF names, and weights rounded while they are read.
Code that turns a slot of bytes into the arguments of a module belongs here; `formats` knows the number encodings.
"""
