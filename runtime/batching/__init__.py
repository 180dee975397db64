"""Which requests go together: blocks and micro-batches of even length, and admission from pass to pass. Here belongs
what groups sequences by their lengths and by the tokens they begin with; it is pure.
"""
