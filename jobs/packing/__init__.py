"""Writes a model as a packed store: reads a shard at a time, packs it, verifies it against the original and publishes
it. The layout of packed numbers is in `runtime/formats`."""
