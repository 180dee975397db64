"""Runs passes: lanes carry micro-batches through the model, a player executes the schedule, sampling ends a pass. Code
that runs while tokens are generated belongs here.
"""
