"""The benchmark's setting of a device: random weights in host memory in front of it. Here belongs what a device alone
needs, and nothing that a machine without Hydra or a network lacks.
"""
