"""What the answers of a finished run are worth: metrics by rows, and their means with intervals. Here belongs what
compares a completion with a reference, or sums up what a judge said of it.
"""
