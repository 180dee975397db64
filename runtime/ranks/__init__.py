"""Ranks: processes that compute one run together. Who they are, what they tell one another within passes and between
them, and how they divide a model's matrices or layers, or fill memory with weights together: the loader and the weight
stream are handed that and do not know it. It knows no engine.
"""
