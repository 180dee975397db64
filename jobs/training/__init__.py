"""How the bundled model came to be: its tasks and stories, its tokenizer and its training, `python -m jobs.training`.
Here belongs what makes runtime/data/tiny and jobs/data/tasks.jsonl anew; nothing else may import it.
"""
