"""Weightstream beside what a user could pick instead, and beside its own predictions. Here belongs what compares;
nothing else may import it.
"""
