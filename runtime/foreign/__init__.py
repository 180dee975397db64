"""Models that were published as code beside their weights, which is never run: written anew as transformers classes.
Here belongs a class that transformers lacks.
"""
