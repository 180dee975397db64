"""How fast this machine is, measured for a prediction or for a profile: disk, memory, products, attention and whole
layers. Here belongs every probe, whoever asks for it.
"""
