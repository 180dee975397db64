"""Finds a model (a directory, a file or the hub) and validates its small files. Code that reads a checkpoint before its
weights belongs here."""
