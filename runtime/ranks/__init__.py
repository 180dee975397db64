"""Ranks: processes that share the reads of one run. Who they are, what they tell one another, and memory that all of
them see. It knows no plan, no model and no engine.
"""
