"""The processor's matrix unit (Intel AMX): linear layers and decode attention in tiles. What names a tile, or knows how
one is laid out, belongs here.
"""
