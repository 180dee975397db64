"""The model in bytes and FLOPs: tensors, stages, and their sizes on disk and in memory; no machine, no requests."""
