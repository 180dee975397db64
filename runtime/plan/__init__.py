"""Decides what a run does before it starts: which bytes are placed where, the order of actions, and how long it takes.

Pure: no torch, I/O, threads or clock. Packages build on each other in the order shape, schedule, placement, cost,
search; only the modules of this folder combine all five.
"""
