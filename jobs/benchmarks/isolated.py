"""A question that a module answers in a process of its own: JSON in, JSON out."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from runtime.errors import MillraceError

from ..config.process import settled


def answer(module: str, question: Mapping[str, object]) -> dict[str, Any]:
    """What `python -m MODULE JSON` prints last. What it says goes to stderr. Raises MillraceError where it fails."""
    command = [sys.executable, "-m", module, json.dumps(question)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=settled(os.environ))
    if done.returncode:
        raise MillraceError(f"{module} ended with exit code {done.returncode}: see above")
    return json.loads(done.stdout.splitlines()[-1])
