"""Exports a run's output to one file, in input order. Code that reads parts and writes formats of other tools lives
here.
"""
