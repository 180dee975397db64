"""Makes plans on this machine: memory budgets, measured rates and cached policies, as inputs of `plan`."""
