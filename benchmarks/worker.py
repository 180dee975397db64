"""`python -m benchmarks.worker MODULE JSON`: runs MODULE's `answers` on the question JSON. Prints each answer as a
line of JSON; output of libraries goes to stderr. Imports nothing else because peers run it with their own Python."""

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO

from runtime.errors import WeightstreamError

REFUSED = "error: "  # begins what a worker says last where Weightstream refuses


def respond(arguments: Sequence[str], out: TextIO) -> None:
    """Writes the answers of the module named first to the question named second. Raises SystemExit with one error on
    stderr if Weightstream refuses."""
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
