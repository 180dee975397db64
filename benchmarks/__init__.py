"""Benchmarks of Weightstream against alternatives and against its own predictions. Nothing else may import this
package."""
