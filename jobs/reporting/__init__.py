"""Compares runs in a table, shows a run as an HTML page, and reports progress. Code that reads files of runs for
people belongs here."""
