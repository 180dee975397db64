"""Checkpoints of random weights in real architectures, with their tokenizers, in the layout of the hub. Here belongs
what makes a model up, for tests, demonstrations and measurements.
"""
