"""Renders chats with transformers' own renderer, in a process that `chat.py` starts: a template is a stranger's
program, and what it takes of time and memory must not be the run's. Run as a file; knows nothing of the project."""

import json
import math
import random
import resource
import sys
from pathlib import Path

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

ERROR_CHARS = 500  # of why there is no text


def main() -> None:
    """A line of JSON in for each chat, a line of JSON out: `text` or `error`. The first line in has the settings."""
    settings = json.loads(sys.stdin.readline())
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])  # of addresses that it has now
    _limit(resource.RLIMIT_AS, num_pages * resource.getpagesize() + settings["memory_bytes"])
    _limit(resource.RLIMIT_CORE, 0)
    _write_line({"ready": True})
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + settings["cpu_seconds"])
        _write_line(_render(settings, line))


def _render(told: dict, line: str) -> dict[str, str]:
    try:
        asked = json.loads(line)
        given = {
            "chat_template": told["template"],
            "add_generation_prompt": True,
            **told["tokens"],
            **asked["variables"],
        }
        random.seed(0)  # the same text of the same messages, whenever a run goes on
        made = render_jinja_template([asked["messages"]], **given)
        text = made[0][0]
    except TemplateError as error:
        return {"error": _in_one_line(str(error)) or type(error).__name__}
    except Exception as error:  # whatever a stranger's program may come to
        return {"error": _in_one_line(f"{type(error).__name__}: {error}").removesuffix(":")}
    if len(text) > told["text_chars"]:
        return {"error": f"it makes {len(text):,} characters of them, {told['text_chars']:,} are allowed"}
    return {"text": text}


def _in_one_line(reason: str) -> str:
    """So much of it that it is an error of a row, in characters that UTF-8 has and a terminal shows."""
    words = " ".join(reason[: 2 * ERROR_CHARS].split())
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in words)[:ERROR_CHARS]


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _write_line(answer: dict[str, str] | dict[str, bool]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
