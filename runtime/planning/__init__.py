"""Makes plans on this machine. Finds the inputs of package `plan`, which computes plans: memory budgets, measured rates
and cached policies (batch sizes, placement of weights and KV, order of steps)."""
