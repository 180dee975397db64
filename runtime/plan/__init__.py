"""Planner: before a run, places weights and KV cache in memories, orders all actions, and predicts the run's time.

The code uses no torch, I/O, threads or clock. Its packages build on each other in the order shape, schedule, placement,
cost, search; only the modules directly in this folder combine all five.
"""
