"""`python -m benchmarks.worker MODULE JSON`: the process in which MODULE's `answers` measures what JSON asks for.

Each answer is a line of JSON as soon as it is there; whatever libraries print goes to stderr. It
stands alone since it is also run by a peer's own Python, which has little but that peer.
"""

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO

from runtime.errors import WeightstreamError

REFUSED = "error: "  # begins what a worker says last where Weightstream refuses


def respond(arguments: Sequence[str], out: TextIO) -> None:
    """Writes the answers of the module named first to the question second. Raises SystemExit where Weightstream
    refuses, with one error on stderr."""
    module, question = arguments
    try:
        for answer in import_module(module).answers(json.loads(question)):
            out.write(json.dumps(answer) + "\n")
            out.flush()
    except WeightstreamError as error:
        sys.stderr.write(f"{REFUSED}{error}\n")
        sys.exit(error.exit_code)


def main() -> None:
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        respond(sys.argv[1:], out)


if __name__ == "__main__":
    main()
