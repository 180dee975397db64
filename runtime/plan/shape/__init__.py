"""What a model is made of, in bytes and FLOPs: tensors, stages, and the bytes that a stage takes on disk and in memory.
Here belongs what follows from the model alone, whatever the machine and the requests.
"""
