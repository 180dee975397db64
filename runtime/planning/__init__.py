"""Makes plans from settings and requests: budgets, measured rates and cached policies. Only what queries the machine
before `plan` decides belongs here.
"""
