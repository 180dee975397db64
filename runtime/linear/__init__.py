"""Linear layers on weights as stored, bfloat16 or quantized, multiplied where they are in their slot. Code that
replaces a linear layer without knowledge of the model belongs here."""
