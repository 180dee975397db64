"""The model in bytes and FLOPs: tensors, stages, and the sizes of stages on disk and in memory. Only what follows from
the model alone belongs here, independent of the machine and the requests.
"""
