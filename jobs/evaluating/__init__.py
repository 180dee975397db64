"""Adapters for evaluation harnesses: their requests become runs or library calls. Harness prompts read from files are
dataset kinds (`jobs/datasets`)."""
