"""Plans runs without reading weights, also for other machines. Makes the tables of supported models and formats.

- shape: the tensors of a model with their sizes, and the sizes of its KV cache; no numbers
- ledger: what a plan needs in one memory, in bytes
- sweep: plans that vary one quantity, such as memory
- binding resource: the resource that is busy longest in a phase, and so limits its speed
"""
