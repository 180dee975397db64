"""A run over the rows of a data set: its directory, plan, parts and rows, and how it goes on after a stop. Here belongs
what makes a run resumable and accountable, whatever is computed for each row.
"""
