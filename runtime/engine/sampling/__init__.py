"""From logits to tokens: transformers' own processors, stop strings, log-probabilities. Here belongs what chooses."""
