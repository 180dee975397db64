"""The order of actions within a pass: how micro-batches and stages interleave, what is prefetched, and the checker that
validates a schedule before it runs. Only order belongs here, no bytes and no seconds.
"""
