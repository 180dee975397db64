"""Model classes that transformers lacks, for checkpoints published only with remote code, which is never run."""
