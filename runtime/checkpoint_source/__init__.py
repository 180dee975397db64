"""Where a model comes from, a directory, a file or the hub, and what of a stranger's files is believed. Here belongs
what reads small files of a checkpoint before its weights.
"""
