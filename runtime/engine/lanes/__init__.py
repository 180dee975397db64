"""Lanes: micro-batches as greenlets inside the model's own forward pass, packed or padded. Code that
lays out the tokens of a micro-batch belongs here.
"""
