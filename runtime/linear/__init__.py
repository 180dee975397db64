"""Products with weights as they are stored: bfloat16 or quantised, multiplied where they lie in a slot. Here belongs
what replaces a linear layer, without knowing the model around it.
"""
