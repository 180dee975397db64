"""From a command line to a typed, checked configuration, and from a failure to one line and an exit code. Here belongs
what every job shares before and after its work.
"""
