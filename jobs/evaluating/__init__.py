"""Evaluation by a harness: its requests become runs of ours, and what the runs come to are its answers. Here belongs
what knows a harness; it knows runs by `jobs/run`, and models not at all.
"""
