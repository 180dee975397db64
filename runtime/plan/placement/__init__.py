"""Memory placement: ledgers in bytes against budgets, the demand of a run, and which weights and KV are streamed."""
