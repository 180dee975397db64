"""Finds the checkpoint bytes of each model parameter, and builds weights from bytes in memory. Includes conversions,
GGUF names, and weights rounded while they are read. How numbers are encoded is in `formats`."""
