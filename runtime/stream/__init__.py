"""Transfers between disk, host and device while lanes compute: weights, experts, keys and values, inputs of attention
on the CPU. The schedule orders them; this package executes them and wraps the compute device.
"""
