"""The kinds of datasets (`dataset.kind`). Each module here defines some of them in its `KINDS`, by name, and is found
automatically.
"""
