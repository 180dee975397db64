"""A transformers model as stages whose weights are streamed: loads it without weights, splits it into stages, reads its
properties. Code that touches the module tree belongs here."""
