"""Writes a model as a packed store, weights in fewer bytes (`weightstream pack`).

A shard is one safetensors file. Shards are read, packed, compared with the original and published one after the other.
The layout of packed numbers is in `runtime/formats`.
"""
