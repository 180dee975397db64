"""OpenAI-compatible Files and Batches API on top of run directories. Receives files, stores batches and starts their
jobs; a batch is an ordinary run in a process of its own.
"""
