"""Adapters for evaluation harnesses: their requests become runs or library calls. Harness prompts that are rows are
dataset kinds (`jobs/datasets`).
"""
