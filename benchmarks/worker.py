"""`python -m benchmarks.worker MODULE JSON`: runs MODULE's `answers` on the question JSON and prints each answer as a
line of JSON; other output goes to stderr. Imports little, because peers run it with their own Python."""

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO

from runtime.errors import WeightstreamError

REFUSED = "error: "  # prefix of a refusal, the last line on stderr


def respond(arguments: Sequence[str], out: TextIO) -> None:
    """Writes answers to the question, as JSON lines. Raises SystemExit after an `error:` line if Weightstream
    refuses."""
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
