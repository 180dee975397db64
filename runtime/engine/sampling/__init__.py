"""Chooses tokens by logits: transformers' own processors, stop strings, log-probabilities. Here belongs what
chooses.
"""
