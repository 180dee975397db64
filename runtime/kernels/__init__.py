"""Code that is compiled at first use: matrix products, decode attention, and steps between products. Here belongs
what a compiler must see to be fast; the callers are `linear`, `attention` and `model`.
"""
