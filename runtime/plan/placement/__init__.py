"""Memory placement: chooses weights and KV cache to keep in memory, and checks tables of memory use against budgets."""
