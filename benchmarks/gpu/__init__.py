"""`suite=gpu`: random weights in host memory, streamed to a device. Must run without Hydra, pyarrow and a network."""
