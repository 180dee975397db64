"""How the numbers of a stored matrix lie in bytes, and become numbers again: a module in `kinds/` for each storage
format, found by lying there. It is a room of its own because reading, products and packing ask the same noun.
"""
