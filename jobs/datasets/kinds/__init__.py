"""The kinds of data sets: each module here has `KINDS`, what its kinds are called and how they become rows, and is
found by lying here. Here belongs what knows an input's format; what all kinds share lies beside this folder.
"""
