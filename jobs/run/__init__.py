"""Execution of a run: reads rows, plans windows, generates blocks, commits parts and summarizes. Contains the code
common to all tasks, and the tasks."""
