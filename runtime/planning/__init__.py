"""From settings and requests to a plan: budgets, measured rates and cached policies. Only what queries the machine
before `plan` decides belongs here.
"""
