"""A transformers model as stages that weights stream through: loaded without weights, cut, and asked for its traits.
Here belongs what touches the module tree.
"""
