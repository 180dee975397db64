"""A model's files in a packed store: read a shard at a time, packed, verified against the original and published. Here
belongs what writes such a store; how packed numbers lie is said by `runtime/formats`.
"""
