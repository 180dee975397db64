"""Where lies what may be kept between runs and made anew."""

import os
from pathlib import Path


def cache_root(configured: str | None = None) -> Path:
    """`offload.cache_dir`, or the user's cache directory by the XDG rules."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(configured or f"{base}/millrace").expanduser()
