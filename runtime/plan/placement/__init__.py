"""Where things live: the ledger of each memory, what a run needs of it, and which weights, keys and values stay and
which travel. Here belongs what is counted in bytes against a budget.
"""
