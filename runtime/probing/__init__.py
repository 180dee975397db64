"""Finds out what a transformers class does without its weights: its layers, its attention, and its behavior in packed
and padded lanes. Code that inspects a class, or an empty copy of it, before loading belongs here."""
