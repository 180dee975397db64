"""OpenAI-compatible Files and Batches API on top of run directories. Receives files, stores batches and starts their
jobs; each batch is an ordinary run in its own process."""
