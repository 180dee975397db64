"""A request as it runs: its tokens so far, how the next one is chosen, and what is read off it. Here belongs what ends
a pass for a sequence, whatever brought it there.
"""
