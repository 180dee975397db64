"""KV caches of a lane: paged, or a rectangle for padded lanes. `KVCache` is the interface that the engine uses."""
