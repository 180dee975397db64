"""The benchmark of few-shot prompts with a common prefix.

Compares Weightstream, which streams weights from disk with and without prefix sharing, with vLLM, which has the weights
and a prefix cache in memory. All settings of Weightstream have the same memory budget. Sharing leaves more of it for
KV, so that more rows are decoded together in a block and share each read of the weights.
"""

import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from transformers import AutoTokenizer

from runtime.config.settings import PolicyKind
from runtime.errors import require
from runtime.synthesize.tokenizer import load_local_tokenizer
from runtime.units import format_bytes

from .config import BenchConfig, make_task
from .contenders import Contender
from .report import table
from .task import BenchmarkTask, Result

NUM_EXAMPLES = 8
WORDS = ("river", "stone", "garden", "winter", "copper", "window", "morning", "basket", "candle", "harbour", "letter")


def few_shot_prompts(texts: Sequence[tuple[str, str]], num_examples: int) -> Iterator[str]:
    """Yields a prompt for each question after the first `num_examples`. Each begins with those questions and answers.
    `texts`: pairs of a question and its answer."""
    shots = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in texts[:num_examples])
    for question, _ in texts[num_examples:]:
        yield f"{shots}Question: {question}\nAnswer:"


@contextmanager
def prompts_file(config: BenchConfig, path: str) -> Iterator[str]:
    """Yields a temporary JSON file with a list of token ids for each prompt. Raises ConfigError if there are too few
    questions."""
    texts = _questions(config)
    require(
        len(texts) >= config.num_prompts + NUM_EXAMPLES,
        f"questions={config.questions} has {len(texts):,} rows, {NUM_EXAMPLES} of them used as examples: num_prompts "
        f"must be {len(texts) - NUM_EXAMPLES:,} or less",
    )
    tokenizer_path = config.tokenizer
    tokenizer = (
        AutoTokenizer.from_pretrained(path) if tokenizer_path is None else load_local_tokenizer(Path(tokenizer_path))
    )
    prompts = few_shot_prompts(texts[: config.num_prompts + NUM_EXAMPLES], NUM_EXAMPLES)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.json"
        file.write_text(json.dumps([tokenizer(prompt)["input_ids"] for prompt in prompts]))
        yield str(file)


def _questions(config: BenchConfig) -> list[tuple[str, str]]:
    """Pairs of a question and its answer, from the file `questions`, or random words if it is null."""
    if config.questions is not None:
        rows = [json.loads(line) for line in Path(config.questions).read_text().splitlines()]
        return [(row["question"], row["answer"]) for row in rows]
    draw = random.Random(3)
    counts = [(draw.randint(20, 60), draw.randint(40, 90)) for _ in range(config.num_prompts + NUM_EXAMPLES)]
    return [(" ".join(draw.choices(WORDS, k=q)), " ".join(draw.choices(WORDS, k=a))) for q, a in counts]


def make_prefix_task(config: BenchConfig, contender: Contender, path: str, file: str) -> BenchmarkTask:
    """The measurement of one contender, with the largest block that fits the budget."""
    task = make_task(config, contender, path, config.rows.get(contender, config.num_prompts))
    return replace(task, policy=PolicyKind.auto.value, num_kv_slots=config.kv_seats, prompts_file=file)


def prefixes_table(rounds: Mapping[str, Sequence[Result]]) -> str:
    """A row for each contender. `off`: deviation of the measured from the predicted seconds. `equal`: sequences with
    the same tokens as for the first contender."""
    reference = next(iter(rounds.values()))[0].tokens
    headings = ["contender", "rows", "of a block", "predicted", "measured, median (min-max)", "off", "rows/s"]
    headings += ["generated tokens/s", "prompt tokens computed", "peak memory above baseline", "read per run", "equal"]
    return table(headings, [_row(name, results, reference) for name, results in rounds.items()])


def _row(name: str, results: Sequence[Result], reference: Sequence[list[int]]) -> list[object]:
    last, seconds = results[-1], [result.seconds for result in results]
    measured = median(seconds)
    predicted = median(result.predicted_prefill_seconds + result.predicted_decode_seconds for result in results)
    pairs = list(zip(last.tokens, reference, strict=False))
    return [
        name,
        len(last.tokens),
        last.num_block_rows or "-",
        f"{predicted:.1f} s" if predicted else "-",
        f"{measured:.1f} s ({min(seconds):.1f}-{max(seconds):.1f})",
        f"{measured / predicted - 1:+.0%}" if predicted else "-",
        f"{len(last.tokens) / measured:.3f}",
        f"{median(result.rate for result in results):.2f}",
        f"{last.num_prompt_tokens:,}" if last.num_prompt_tokens else "-",
        format_bytes(median(result.peak_bytes - result.baseline_bytes for result in results)),
        format_bytes(median(result.bytes_read for result in results)),
        f"{sum(ours == theirs for ours, theirs in pairs)} of {len(pairs)}",
    ]
