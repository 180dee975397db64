"""Finds a model (a directory, a file, a URL or the hub) and reads and validates everything but its weights."""
