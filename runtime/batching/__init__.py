"""Groups requests by length and shared prefix: into blocks and micro-batches, and for continuous batching. Pure."""
