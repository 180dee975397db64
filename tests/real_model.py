"""The trained model of scripts/trained_model.py for tests: its weights by transformers, and texts to try it on."""

import gzip
import json
from collections.abc import Iterator
from copy import copy
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runtime.checkpoint_source.gguf_tokenizer import load_gguf_tokenizer
from runtime.store.gguf import read_gguf
from tests.support import SHARED_DATA

DOCS = Path(__file__).resolve().parents[1] / "docs"


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
