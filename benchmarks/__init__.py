"""Benchmarks of Weightstream against alternatives and its own predictions. Nothing else may import it.

A suite (`suite=`) measures contenders in rounds and prints a table. A contender is a program or a setting of
Weightstream; a contender other than Weightstream is a peer. A pass is one forward through all layers, and a block is
the sequences that each pass computes together. Each measurement runs in a process of its own, a worker
(`benchmarks.worker`), which calls `answers` of a module with the measurement's arguments.
"""
