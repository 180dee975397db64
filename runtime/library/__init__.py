"""The library's front door, `Runtime`: prompts in, completions, scores and embeddings out. Here belongs what turns a
caller's words into requests and what became of them into values.
"""
