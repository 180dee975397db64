"""Importing this tells the garbage collector that all that is there stays: processes that are forked off need not look
through it, nor copy the memory in which the collector would leave its marks."""

import gc

gc.freeze()
