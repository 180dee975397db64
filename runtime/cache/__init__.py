"""KV caches of a lane: in pages of equal size, or in a rectangle for padded lanes. `KVCache` is the interface that the
engine uses; attention over the cached keys and values is in `attention`.
"""
