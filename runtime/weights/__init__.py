"""Maps checkpoint bytes to model parameters: layouts, conversions, GGUF names, and weights rounded while they are read.
The encodings of numbers are in `formats`."""
