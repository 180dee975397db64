"""Inspects a transformers class without its weights: layers, attention, and behavior in packed and padded lanes."""
