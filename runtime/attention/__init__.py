"""Attention of lanes over cached keys and values, on an accelerator and on the CPU, and the layout of a pass that it
looks at. Here belongs what turns queries, keys and values into answers, without knowing a model.
"""
