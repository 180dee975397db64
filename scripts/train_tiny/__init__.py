"""Trains the bundled model: tasks, stories, tokenizer, training. `python -m scripts.train_tiny` makes runtime/data/tiny
and jobs/data/tasks.jsonl. Nothing else may import it."""
