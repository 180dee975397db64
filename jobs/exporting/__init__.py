"""Exports a run's output to one file, in input order, also in formats of other tools."""
