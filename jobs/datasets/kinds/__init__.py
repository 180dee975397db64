"""Dataset kinds. Each module here defines `KINDS` (kind names and readers) and is discovered automatically. Code that
knows one input format lives here; shared code is in the parent package.
"""
