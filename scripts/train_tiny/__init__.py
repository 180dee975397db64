"""How the bundled model came to be: its tasks, its stories, its tokenizer, its training. `python -m scripts.train_tiny`
makes runtime/data/tiny and jobs/data/tasks.jsonl anew; nothing else may import it.
"""
