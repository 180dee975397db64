"""When things happen within a pass: actions, the orders in which micro-batches and stages meet, what is brought ahead,
and the checker that plays a schedule before anyone trusts it. Here belongs what knows order, but no bytes and no
seconds.
"""
