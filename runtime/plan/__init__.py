"""Decides what a run does before it does anything: which bytes lie where, what happens in which order, and how long
it takes. All of it is pure: no torch, no I/O, no threads and no clock. The rooms build on each other in the order
shape, schedule, placement, cost, search; only the modules of this folder compose all five.
"""
