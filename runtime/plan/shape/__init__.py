"""Sizes of a model, independent of machine and requests: FLOPs, and bytes of tensors on disk and in memory."""
