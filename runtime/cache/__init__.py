"""Keys and values of a lane: in pages of equal size, or in a rectangle for lanes with padding. Here belongs what
holds them and says where they lie; attention over them is in `attention`. What the engine asks of any of them is
`KVCache`.
"""
