"""`python -m benchmarks.worker MODULE JSON`: calls `answers` of MODULE with the object JSON.

Each answer is printed as a line of JSON; other output goes to stderr. Imports little, because a peer's worker runs with
the Python of the peer's environment.
"""

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO

from runtime.errors import WeightstreamError

REFUSED = "error: "  # before the message of a WeightstreamError, the last line on stderr


def respond(arguments: Sequence[str], out: TextIO) -> None:
    """Writes the answers to `out`, as lines of JSON. After a WeightstreamError, writes its message to stderr and raises
    SystemExit."""
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
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries that print must not break the JSON
        respond(sys.argv[1:], out)


if __name__ == "__main__":
    main()
