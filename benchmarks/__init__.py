"""Benchmarks of Weightstream against alternatives and its own predictions. Nothing else may import it."""
