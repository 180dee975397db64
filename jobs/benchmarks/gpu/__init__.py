"""Ways to use an accelerator, measured one after the other in one process over weights that are on no disk. Here
belongs what a machine without Hydra or a network needs to run them.
"""
