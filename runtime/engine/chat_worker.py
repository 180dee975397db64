"""Renders chats with transformers' own renderer, in a process that `chat.py` starts: a template is a stranger's
program, and what it takes of time and memory must not be the run's. Run as a file; knows nothing of the project."""

import json
import math
import resource
import sys
from pathlib import Path

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template


def main() -> None:
    """A line of JSON in for each chat, a line of JSON out: `text` or `error`. The first line in has the settings."""
    told = json.loads(sys.stdin.readline())
    _limit(resource.RLIMIT_AS, _address_bytes() + told["memory_bytes"])
    _limit(resource.RLIMIT_CORE, 0)
    _say({"ready": True})
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + told["cpu_seconds"])
        _say(_answer(told, line))


def _answer(told: dict, line: str) -> dict[str, str]:
    try:
        asked = json.loads(line)
        given = {"chat_template": told["template"], "add_generation_prompt": True, **told["tokens"], **asked["given"]}
        made = render_jinja_template([asked["messages"]], **given)
        text = made[0][0]
    except TemplateError as error:
        return {"error": str(error).strip() or type(error).__name__}
    except Exception as error:  # whatever a stranger's program may come to
        return {"error": f"{type(error).__name__}: {error}".strip().removesuffix(":")[: told["text_chars"]]}
    if len(text) > told["text_chars"]:
        return {"error": f"it makes {len(text):,} characters of them, {told['text_chars']:,} are allowed"}
    return {"text": text}


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def _say(answer: dict[str, str] | dict[str, bool]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
