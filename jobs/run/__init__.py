"""How a run goes: its rows asked for, its windows planned, its blocks generated and committed, and what it comes to.
Here belongs what is the same for every task, and the tasks themselves.
"""
