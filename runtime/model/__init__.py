"""A transformers model as stages that weights are streamed through: loading without weights, splitting, and reading its
properties. Code that touches the module tree belongs here."""
