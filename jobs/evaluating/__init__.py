"""Evaluation by a harness: its requests become runs of ours, or calls of the library, and what these come to are its
answers. Here belongs what knows how a harness asks; its prompts as rows are kinds of `jobs/datasets`.
"""
