"""Prepares a transformers model for streamed weights: loads it without weights, splits it into stages (parts whose
weights are read together), and reads its properties. Code that changes the module tree belongs here."""
