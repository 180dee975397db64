"""Storage formats of weights: how a matrix is encoded in bytes, and how its rows are decoded. `registry.py` imports
every module in `kinds/`."""
