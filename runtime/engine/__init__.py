"""Runs passes: lanes carry micro-batches through the model, a player plays the schedule, sampling ends a pass. Here
belongs what happens while tokens are generated.
"""
