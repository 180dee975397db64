"""Linear layers on weights as stored, bfloat16 or quantized, without a copy of the weights: they are multiplied in the
slot, the buffer into which their layer was read. Code that replaces a linear layer and knows nothing about the model
belongs here."""
