"""Ranks, the processes that compute one run together: their messages and collectives, how they split a model's matrices
or layers, and how they read weights together. Independent of the engine.
"""
