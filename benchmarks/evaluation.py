"""The benchmark of scores with lm-evaluation-harness: equality, speed and memory.

The task is synthetic: questions with four choices after five shared examples, like MMLU. Weightstream streams weights
from disk. It is compared with the harness's own transformers model (`hf`), in memory and offloaded to disk.
"""

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from transformers import AutoTokenizer

from runtime.errors import WeightstreamError, require
from runtime.synthesize.checkpoints import synthesize_checkpoint
from runtime.units import format_bytes

from .config import BenchConfig
from .harness_scores import HarnessContender, HarnessTask, Scores
from .report import table
from .runner import WorkerProcess
from .task import Say, SuiteResult

NUM_CHOICES, NUM_EXAMPLES, NUM_TRAINED = 4, 5, 40
TOLERANCE = 1e-3  # for the log-probability of a choice
TASK = "made_up_choices"
SHAPE: Mapping[str, object] = {  # as Llama 3.2 1B, with a smaller vocabulary
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}  # fmt: skip
BATCH_SIZES = {
    HarnessContender.weightstream: (),
    HarnessContender.unshared: (),
    HarnessContender.hf: (1, 4, 16),
    HarnessContender.hf_disk: (8, 32),
}
WORDS = (
    "river", "stone", "garden", "winter", "copper", "window", "morning", "basket", "candle", "harbour",
    "letter", "meadow", "orange", "pepper", "silver", "thunder", "velvet", "walnut", "yellow", "anchor",
    "bridge", "carpet", "desert", "engine", "forest", "guitar", "hammer", "island", "jacket", "kettle",
)  # fmt: skip
YAML = """task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/test.jsonl, train: {folder}/train.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
fewshot_split: train
fewshot_config: {{sampler: first_n}}
num_fewshot: {num_examples}
output_type: multiple_choice
doc_to_text: "Q: {{{{question}}}}?\\nA:"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""

MeasureScores = Callable[[HarnessTask], Scores]
Rounds = Mapping[HarnessContender, Sequence[Scores]]


def measure_scores(task: HarnessTask) -> Scores:
    """Measures in a separate process."""
    worker = WorkerProcess(
        name=HarnessContender(task.contender).value,
        module="benchmarks.harness_scores",
        question=asdict(task),
        hides_stderr=True,
    )
    return Scores.from_answer(json.loads(list(worker.lines())[-1]))


def run_evaluation(config: BenchConfig, say: Say, measure: MeasureScores = measure_scores) -> SuiteResult:
    """Runs all rounds. Raises WeightstreamError if scores of a round differ by more than the tolerance."""
    missing = [name for name in ("lm_eval", "accelerate") if find_spec(name) is None]
    require(not missing, f"suite=evaluation needs {' and '.join(missing)}: pip install -e '.[eval,bench]'")
    rounds: dict[HarnessContender, list[Scores]] = {contender: [] for contender in HarnessContender}
    with _checkpoint(config) as path, tempfile.TemporaryDirectory() as folder:
        num_documents = -(-config.num_prompts // NUM_CHOICES)
        write_task(Path(folder), path, num_documents, config.prompt_tokens)
        tasks = {
            contender: HarnessTask(
                contender=contender.value,
                path=str(path),
                tasks=folder,
                task=TASK,
                num_documents=num_documents,
                weight_share=config.weight_share,
                num_threads=config.num_threads,
                batch_size=config.batch_size if BATCH_SIZES[contender] else None,
            )
            for contender in HarnessContender
        }
        tasks = {contender: _choose_sizes(each, config.peer_minutes, say, measure) for contender, each in tasks.items()}
        if config.peer_minutes is not None:  # without sharing, it may be as slow as the peer: the same documents
            count = tasks[HarnessContender.hf].num_documents
            tasks[HarnessContender.unshared] = replace(tasks[HarnessContender.unshared], num_documents=count)
        for number in range(1, config.rounds + 1):
            for contender, each in tasks.items():
                rounds[contender].append(measure(each))
                say(f"round {number} {contender.value}: {rounds[contender][-1].result.seconds:.1f} s")
            require_equal_scores(rounds)
    results = {contender.value: [scores.result for scores in each] for contender, each in rounds.items()}
    peers = [contender.value for contender in HarnessContender if BATCH_SIZES[contender]]
    return SuiteResult(table=evaluation_table(rounds), rounds=results, peers=peers)


@contextmanager
def _checkpoint(config: BenchConfig) -> Iterator[Path]:
    """Yields the first of `checkpoints`, or a temporary checkpoint with random weights and `SHAPE`."""
    if config.checkpoints:
        yield Path(config.checkpoints[0])
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "llama-1b"
        synthesize_checkpoint(model="llama", overrides=SHAPE, directory=path, dtype=torch.bfloat16)
        yield path


def write_task(folder: Path, checkpoint: Path, num_documents: int, prompt_tokens: int) -> None:
    """Writes the task's YAML and questions. A question and its examples have about `prompt_tokens` tokens."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokens_per_word = len(tokenizer(" ".join(WORDS))["input_ids"]) / len(WORDS)
    answer_words = 4  # three words, and labels
    num_words = max(1, round(prompt_tokens / (NUM_EXAMPLES + 1) / tokens_per_word) - answer_words)
    draw = random.Random(5)
    for name, count in (("test", num_documents), ("train", NUM_TRAINED)):
        rows = [_random_question(draw, num_words) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = YAML.format(task=TASK, folder=folder, num_examples=NUM_EXAMPLES)
    (folder / f"{TASK}.yaml").write_text(text)


def _random_question(draw: random.Random, num_words: int) -> dict[str, object]:
    return {
        "question": " ".join(draw.choices(WORDS, k=num_words)),
        "choices": [" ".join(draw.sample(WORDS, 3)) for _ in range(NUM_CHOICES)],
        "answer": draw.randrange(NUM_CHOICES),
    }


def _choose_sizes(task: HarnessTask, max_minutes: float | None, say: Say, measure: MeasureScores) -> HarnessTask:
    """Returns the task with the peer's best batch size and with as many documents as fit into `max_minutes`."""
    sizes = BATCH_SIZES[HarnessContender(task.contender)]  # empty for Weightstream
    if not sizes or (task.batch_size is not None and max_minutes is None):
        return task
    sizes = sizes if task.batch_size is None else (task.batch_size,)
    trial = replace(task, num_documents=min(task.num_documents, -(-max(sizes) // NUM_CHOICES)))
    best, best_rate = sizes[0], 0.0
    for size in sizes:
        rate = measure(replace(trial, batch_size=size)).result.rate
        say(f"{task.contender} in batches of {size}: {rate:.2f} requests/s")
        if rate < best_rate:
            break
        best, best_rate = size, rate
    max_documents = task.num_documents if max_minutes is None else int(60 * max_minutes * best_rate / NUM_CHOICES)
    return replace(
        task, batch_size=best, num_documents=max(trial.num_documents, min(task.num_documents, max_documents))
    )


def require_equal_scores(rounds: Rounds) -> None:
    """Raises WeightstreamError if scores of the latest round differ by more than `TOLERANCE` from those of `hf`."""
    for contender, all_scores in rounds.items():
        difference = max_difference(all_scores[-1], rounds[HarnessContender.hf][-1])
        if difference > TOLERANCE:
            raise WeightstreamError(
                f"{contender.value}: log-probabilities are up to {difference:.2g} from those of "
                f"{HarnessContender.hf.value}, more than {TOLERANCE:g}"
            )


def max_difference(scores: Scores, reference: Scores) -> float:
    """The largest difference of log-probabilities; infinity if only one of the two models answers a document
    correctly."""
    if any(ours != theirs for ours, theirs in zip(scores.is_right, reference.is_right, strict=False)):
        return float("inf")
    pairs = zip(scores.logprobs, reference.logprobs, strict=False)
    return max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


def evaluation_table(rounds: Rounds) -> str:
    """A row for each contender. Ratios of speed and memory are Weightstream's number divided by the row's."""
    ours = rounds[HarnessContender.weightstream]
    reference = rounds[HarnessContender.hf][-1]
    headings = ["contender", "batch", "requests", "requests/s, median (min-max)", "Weightstream is faster"]
    headings += ["peak memory above baseline", "Weightstream takes of it", "read per run", "accuracy", "differs by"]
    rows = []
    for contender, all_scores in rounds.items():
        results = [scores.result for scores in all_scores]
        rates = [result.rate for result in results]
        peak = _peak(all_scores)
        is_right = all_scores[-1].is_right
        rows.append(
            [
                contender.value,
                results[0].batch_size or "-",
                f"{NUM_CHOICES * len(is_right):,}",
                f"{median(rates):.3f} ({min(rates):.3f}-{max(rates):.3f})",
                f"{median(scores.result.rate for scores in ours) / median(rates):.2f}x",
                format_bytes(peak),
                f"{_peak(ours) / peak:.0%}",
                format_bytes(median(result.bytes_read for result in results)),
                f"{sum(is_right)} of {len(is_right)}",
                f"{max_difference(all_scores[-1], reference):.1e}",
            ]
        )
    return table(headings, rows)


def _peak(all_scores: Sequence[Scores]) -> float:
    return median(scores.result.peak_bytes - scores.result.baseline_bytes for scores in all_scores)
