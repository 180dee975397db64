"""Model classes that transformers lacks. They replace the Python code that some checkpoints contain, which is never
run."""
