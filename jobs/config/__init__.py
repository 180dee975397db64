"""Command lines, typed settings, help texts, signals, and the conversion of exceptions to exit codes: shared by all
jobs."""
