"""Draws pictures, and reads and writes traces, for all commands."""
