"""`suite=gpu`: random weights in host memory, streamed to a device. Must run without Hydra, pyarrow and a network.

A variant is a setting of Weightstream or a peer (another library), and runs one of these models:

- whole model: as many layers as fit twice into host memory
- cut model: as many layers as fit into the device
- disk model: few layers, written to disk
- int4 model: the whole model in int4
"""
