"""What a transformers class does, found out without its weights: its layers, its attention, what it would make of
packed and of padded lanes. Here belongs what looks at a class or at a hollow copy of it, before anything is loaded.
"""
