"""Memory placement: the ledger of each memory, the needs of a run, and which weights and KV stay resident or are
streamed. Only what is counted in bytes against a budget belongs here.
"""
