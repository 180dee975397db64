"""Chats as the model's own template spells them, its special tokens included.

A template is a program that came with the model. It runs in a process of its own, in jinja's sandbox, and gets so much
processor time and memory for each chat; what it does beyond that, or whatever else it fails with, costs that chat
alone.
"""

import json
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..closing import Closing
from ..errors import ConfigError

CPU_SECONDS = 5  # of processor time for a chat
WALL_SECONDS = 180  # for a chat, and for the process to begin: on a machine that is not idle
MEMORY_BYTES = 512 * 2**20  # beyond what the process takes to begin with
TEXT_CHARS = 16 * 2**20  # of a rendered chat
MAX_CRASHES = 3  # of the process before it has rendered anything


class TemplateRefusal(ValueError):
    """Why the template makes no text of these messages, in its own words."""

    @property
    def as_error(self) -> str:
        """What is wrong with a prompt."""
        return f"the model's chat template refuses the messages: {self}"


class ChatRenderer(Closing):
    """Starts its process with the first chat, and another where a chat has cost it. `cpu_seconds`: for each chat.
    `asked_by` and `otherwise`: who wants chats, and what to do without, for errors that are about all of them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        cpu_seconds: int = CPU_SECONDS,
        purpose: str = "there are messages",
        alternative: str = "give texts instead",
    ):
        self._purpose, self._alternative = purpose, alternative
        self._settings = {
            "template": tokenizer.get_chat_template(),
            "tokens": tokenizer.special_tokens_map,
            "cpu_seconds": cpu_seconds,
            "memory_bytes": MEMORY_BYTES,
            "text_chars": TEXT_CHARS,
        }
        self._cpu_seconds = cpu_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._num_rendered = self._num_crashes = 0

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def render(self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object] | None = None) -> str:
        """The messages and the opening of the answer. `given`: what the template gets beside them, such as `tools` or
        `enable_thinking`; all of it JSON. Raises TemplateRefusal; ConfigError where the template ends every process
        that it is given."""
        if not messages:
            raise TemplateRefusal("there are no messages")
        if self._process is None:
            self._start()
        assert self._process is not None, "it has just been started"
        asked = {"messages": [dict(message) for message in messages], "variables": dict(variables or {})}
        answer = _exchange(self._process, asked)
        if answer is None:  # it has ended over the question, or was ended
            raise self._crash_error()
        if "text" not in answer:
            raise TemplateRefusal(answer.get("error", "its process gave no answer"))
        self._num_rendered += 1
        return answer["text"]

    def _start(self) -> None:
        command = [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        if _exchange(self._process, self._settings) is None:
            self.close()
            raise ConfigError(
                f"{self._purpose}: the process that renders chats did not begin within {WALL_SECONDS} s: "
                f"try {' '.join(command)} by hand"
            )

    def _crash_error(self) -> Exception:
        assert self._process is not None, "it has just died"
        code = self._process.poll()
        self.close()
        self._num_crashes += 1
        late = f"it takes more than {self._cpu_seconds} s of processor time"
        ended = (
            f"it ends its process ({'no answer' if code is None else signal.Signals(-code).name if code < 0 else code})"
        )
        reason = late if code in (None, -signal.SIGXCPU) else ended
        if self._num_rendered == 0 and self._num_crashes >= MAX_CRASHES:
            return ConfigError(
                f"{self._purpose}, but the model's chat template made no text of the first "
                f"{self._num_crashes} chats: {reason}; mend it, or {self._alternative}"
            )
        return TemplateRefusal(reason)


def _exchange(process: "subprocess.Popen[bytes]", value: object) -> dict[str, str] | None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        asked = json.dumps(value).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateRefusal(f"they are no JSON: {error}") from error
    try:
        process.stdin.write(asked)
        process.stdin.flush()
    except BrokenPipeError:
        process.wait()
        return None
    if not select.select([process.stdout], [], [], WALL_SECONDS)[0]:
        return None
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        process.wait()
        return None
    return json.loads(line)
