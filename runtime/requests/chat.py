"""Renders chat messages to text with the model's chat template, which includes special tokens.

A template is untrusted code. It runs in jinja's sandbox in a subprocess (`chat_worker.py`), with limits on CPU time and
memory. If it fails for one chat, other chats are still rendered."""

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

CPU_SECONDS = 5  # CPU time per chat
WALL_SECONDS = 180  # per chat and for startup, on a busy machine
MEMORY_BYTES = 512 * 2**20  # that the subprocess may use in addition to its memory at startup
TEXT_CHARS = 16 * 2**20  # limit of a rendered chat
MAX_CRASHES = 3  # after so many crashes without a rendered chat, the error concerns all chats


class TemplateRefusal(ValueError):
    """The chat template cannot render these messages. The text is the template's own error message."""

    @property
    def as_error(self) -> str:
        return f"the model's chat template refuses the messages: {self}"


class ChatRenderer(Closing):
    """Renders chats in a subprocess, started on first use and restarted after a crash. `cpu_seconds`: limit per chat.
    `purpose` and `alternative`: for error messages that concern all chats."""

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
        """Renders messages followed by the generation prompt. `variables`: extra template variables such as `tools` or
        `enable_thinking`; must be JSON. Raises TemplateRefusal if the template fails for these messages, ConfigError if
        its first subprocesses all crashed."""
        if not messages:
            raise TemplateRefusal("there are no messages")
        if self._process is None:
            self._start()
        assert self._process is not None, "started above"
        request = {"messages": [dict(message) for message in messages], "variables": dict(variables or {})}
        response = _exchange(self._process, request)
        if response is None:  # it crashed or hit a limit
            raise self._crash_error()
        if "text" not in response:
            raise TemplateRefusal(response.get("error", "its process sent no text"))
        self._num_rendered += 1
        return response["text"]

    def _start(self) -> None:
        command = [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        if _exchange(self._process, self._settings) is None:
            self.close()
            raise ConfigError(
                f"{self._purpose}: the process that renders chats did not start within {WALL_SECONDS} s: "
                f"try {' '.join(command)} by hand"
            )

    def _crash_error(self) -> Exception:
        """Ends the subprocess after a crash or timeout, and returns the error to raise."""
        assert self._process is not None, "it has just crashed"
        code = self._process.poll()
        self.close()
        self._num_crashes += 1
        if code in (None, -signal.SIGXCPU):  # None: still running, so `_exchange` timed out
            reason = f"it takes more than {self._cpu_seconds} s of processor time"
        else:
            reason = f"it ends its process ({signal.Signals(-code).name if code < 0 else code})"
        if self._num_rendered == 0 and self._num_crashes >= MAX_CRASHES:
            return ConfigError(
                f"{self._purpose}, but the model's chat template rendered none of the first "
                f"{self._num_crashes} chats: {reason}; repair it, or {self._alternative}"
            )
        return TemplateRefusal(reason)


def _exchange(process: "subprocess.Popen[bytes]", value: object) -> dict[str, str] | None:
    """Sends a line of JSON and returns the response line. None if the process ended, or after `WALL_SECONDS`."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        request = json.dumps(value).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateRefusal(f"they are not valid JSON: {error}") from error
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except BrokenPipeError:
        process.wait()
        return None
    if not select.select([process.stdout], [], [], WALL_SECONDS)[0]:
        return None
    response = process.stdout.readline()
    if not response.endswith(b"\n"):
        process.wait()
        return None
    return json.loads(response)
