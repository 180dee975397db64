"""The way from settings and requests to a plan and an open session: budgets, rates, kept policies, and what happens
where memory runs out. Here belongs what asks the machine before `plan` decides.
"""
