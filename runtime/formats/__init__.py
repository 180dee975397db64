"""Storage formats of weights: how numbers are encoded in bytes and decoded again. Each module in `kinds/` is discovered
and registered. Reading, products and packing all use these formats.
"""
