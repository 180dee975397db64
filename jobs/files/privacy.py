"""Who may read what a run writes: prompts and completions are in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

PRIVATE_FOLDER_MODE = 0o700
OTHERS = 0o077


@contextmanager
def files_made_private() -> Iterator[None]:
    """What this process makes inside is for its owner alone: by the umask, so that nothing is left out."""
    before = os.umask(OTHERS)
    os.umask(before | OTHERS)
    try:
        yield
    finally:
        os.umask(before)
