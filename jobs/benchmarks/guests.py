"""Peers in virtual environments of their own, made at their first use: their versions are theirs, not ours."""

import hashlib
import logging
import subprocess
import sys
import venv
from pathlib import Path

from runtime.errors import MillraceError
from runtime.store.cache_root import cache_root

from .contenders import Guest

log = logging.getLogger(__name__)


def python_of(guest: Guest) -> Path:
    """Of its environment, which is made first where there is none; that can take minutes. Raises MillraceError with
    what pip said."""
    key = hashlib.sha256(" ".join((sys.version, *guest.requirements, *guest.unwanted)).encode()).hexdigest()[:12]
    folder = cache_root() / "peers" / f"{guest.module.rpartition('.guest_')[2]}-{key}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        log.warning("installing %s into %s: this is done once, and may compile", ", ".join(guest.requirements), folder)
        venv.create(folder, with_pip=True, clear=True)
        _pip(python, guest, "install", *guest.requirements)
        if guest.unwanted:
            _pip(python, guest, "uninstall", "--yes", *guest.unwanted)
        ready.touch()
    return python


def _pip(python: Path, guest: Guest, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise MillraceError(f"{', '.join(guest.requirements)} cannot be installed: {last}")
