"""Storage formats of weights: encodings of numbers in bytes, and their decoders. Each module in `kinds/` registers
itself."""
