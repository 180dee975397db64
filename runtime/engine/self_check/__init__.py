"""Whether lanes give a class's tokens, found out before a run. Here belongs what compares an excerpt of the model
with the class itself.
"""
