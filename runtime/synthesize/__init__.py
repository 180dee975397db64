"""Writes random checkpoints of real architectures, with tokenizers, for tests, demonstrations and measurements."""
