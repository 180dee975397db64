"""KV caches of a lane (micro-batch): in pages for packed lanes, or as rectangular tensors for padded lanes. `KVCache`
is the interface that the engine uses."""
