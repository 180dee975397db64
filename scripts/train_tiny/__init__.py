"""Trains the bundled model and makes runtime/data/tiny and jobs/data/tasks.jsonl. Nothing else may import it."""
