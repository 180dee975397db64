"""Ranks: processes that compute one run together. Who they are, what they tell one another within passes and between
them, and memory that all of them see. It knows no plan, no model and no engine.
"""
