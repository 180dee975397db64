"""Renderers of chats that are forked off a process which has loaded transformers, where what they render is tested and
not that their process starts; `test_chat.py` starts real ones."""

import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace

from runtime.requests import chat, chat_worker
from tests.processes import PROCESSES


class ForkedRenderer:
    """In the place of `subprocess.Popen`, for the command of a renderer."""

    def __init__(self, command: Sequence[str], **pipes: object):
        assert command[-1] == str(chat_worker.__file__)
        asked, self._ask = PROCESSES.Pipe(duplex=False)
        self._answer, answered = PROCESSES.Pipe(duplex=False)
        self._process = PROCESSES.Process(target=_work, args=(asked, answered))
        self._process.start()
        asked.close()
        answered.close()
        self.stdin = os.fdopen(os.dup(self._ask.fileno()), "wb")
        self.stdout = os.fdopen(os.dup(self._answer.fileno()), "rb")
        self._ask.close()
        self._answer.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self.poll()

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> None:
        self.wait()
        self.stdout.close()
        try:
            self.stdin.close()
        except BrokenPipeError:
            return


def _work(asked: Connection, answered: Connection) -> None:
    os.setsid()
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    sys.stdin = os.fdopen(os.dup(asked.fileno()), encoding="utf-8")
    sys.stdout = os.fdopen(os.dup(answered.fileno()), "w", encoding="utf-8")
    asked.close()
    answered.close()
    chat_worker.main()


FORKED = SimpleNamespace(Popen=ForkedRenderer, PIPE=chat.subprocess.PIPE, DEVNULL=chat.subprocess.DEVNULL)
