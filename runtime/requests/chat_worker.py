"""The subprocess that renders chats with transformers, started by `chat.py`. Runs as a script and imports nothing of
this project."""

import json
import math
import random
import resource
import sys
from pathlib import Path

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

ERROR_CHARS = 500  # limit of an error message


def main() -> None:
    """Reads one line of JSON per chat from stdin, and writes one line to stdout, with `text` or `error`. The first line
    of stdin contains the settings."""
    settings = json.loads(sys.stdin.readline())
    # Templates are untrusted: limit the memory beyond the current address space, forbid core dumps, limit CPU time.
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _limit(resource.RLIMIT_AS, num_pages * resource.getpagesize() + settings["memory_bytes"])
    _limit(resource.RLIMIT_CORE, 0)
    _write_line({"ready": True})
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + settings["cpu_seconds"])
        _write_line(_render(settings, line))


def _render(settings: dict, line: str) -> dict[str, str]:
    """Renders one chat. `line`: JSON with `messages` and `variables`. Returns {"text": ...} or {"error": ...}."""
    try:
        request = json.loads(line)
        arguments = {
            "chat_template": settings["template"],
            "add_generation_prompt": True,
            **settings["tokens"],
            **request["variables"],
        }
        random.seed(0)  # templates may use random: a resumed run must render the same text
        rendered = render_jinja_template([request["messages"]], **arguments)
        text = rendered[0][0]
    except TemplateError as error:
        return {"error": _in_one_line(str(error)) or type(error).__name__}
    except Exception as error:  # an untrusted template may raise anything
        return {"error": _in_one_line(f"{type(error).__name__}: {error}").removesuffix(":")}
    if len(text) > settings["text_chars"]:
        return {"error": f"it renders {len(text):,} characters; the limit is {settings['text_chars']:,}"}
    return {"text": text}


def _in_one_line(reason: str) -> str:
    """Returns `reason` on one line, shortened, with unprintable characters escaped."""
    line = " ".join(reason[: 2 * ERROR_CHARS].split())
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)[:ERROR_CHARS]


def _limit(kind: int, value: int) -> None:
    """Sets the soft limit of a resource, at most its hard limit."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _write_line(answer: dict[str, str] | dict[str, bool]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
