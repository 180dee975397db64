"""Grades finished runs: per-row metrics against references or from a judge's ratings, and means with confidence
intervals.
"""
