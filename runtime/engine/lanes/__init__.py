"""Lanes: micro-batches as greenlets inside the model's own forward pass, packed or padded. Here belongs a way to lay
out the tokens of a micro-batch.
"""
