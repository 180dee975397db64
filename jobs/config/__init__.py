"""A command line becomes a typed, checked configuration, and a failure one line and an exit code. Here belongs
what every job shares before and after its work.
"""
