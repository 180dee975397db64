"""Transfers between disk, host and device while micro-batches compute: weights, experts, keys and values, inputs of
attention on the CPU. A schedule decides the order of transfers; this package runs them, and wraps the compute device.
"""
