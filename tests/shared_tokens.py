"""How many tokens of prompts a run computes where these share what they begin with, beside where they do not.

`python -m tests.shared_tokens DATA [ROWS_OF_A_LANE]` makes few-shot prompts of the data sets in the folder DATA, which
holds gsm8k, bbh, mt_bench and a tokenizer, and has a tiny random model answer them.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.prefixes import few_shot_prompts
from jobs.datasets.config import DatasetConfig, DatasetKind, read_rows
from runtime import Runtime, Targets
from runtime.batching.prefixes import num_spared
from runtime.engine.records import PassRecord
from runtime.library.scoring import make_scoring_batch
from runtime.sequences.sequence import Request
from runtime.synthesize.tokenizer import load_local_tokenizer

TOKENIZER = "tokenizer/mixtral_tokenizer.model.v1"
Ask = Callable[[Runtime], tuple[list[Request], int]]  # requests, and the tokens of prompts if each were alone


def checkpoint(directory: Path, tokenizer: Path) -> Path:
    """A model of one tiny layer that takes the tokenizer's tokens."""
    tokenizer_object = load_local_tokenizer(tokenizer)
    tokenizer_object.save_pretrained(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer_object), max_position_embeddings=8192, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def generating(prompts: Sequence[str], num_samples: int = 1) -> Ask:
    def ask(runtime: Runtime) -> tuple[list[Request], int]:
        encode = runtime.model.tokenizer.encode
        ids = [
            (f"{index}-{sample}", encode(text)) for index, text in enumerate(prompts) for sample in range(num_samples)
        ]
        requests = [request for each in ids if isinstance(request := runtime.request(*each), Request)]
        return requests, sum(len(request.prompt_ids) for request in requests)

    return ask


def scoring(pairs: Sequence[tuple[str, Sequence[str]]]) -> Ask:
    def ask(runtime: Runtime) -> tuple[list[Request], int]:
        asked = make_scoring_batch(runtime.model, [(i, Targets(*pair)) for i, pair in enumerate(pairs)])
        return asked.requests, sum(len(request.prompt_ids) for request in asked.members)

    return ask


def gsm8k(data: Path) -> Ask:
    rows = [json.loads(line) for line in (data / "gsm8k" / "test.jsonl").read_text().splitlines()]
    texts = [(row["question"], row["answer"]) for row in rows[: 8 + 512]]
    return generating(list(few_shot_prompts(texts, 8)))


def bbh(data: Path) -> Ask:
    examples = json.loads((data / "bbh" / "logical_deduction_three_objects.json").read_text())["examples"]
    texts = [(each["input"], each["target"]) for each in examples]
    return scoring([(prompt, [" (A)", " (B)", " (C)"]) for prompt in few_shot_prompts(texts, 3)])


def helm(data: Path) -> Ask:
    rows = read_rows(DatasetConfig(kind=DatasetKind.helm_synthetic_reasoning))
    return generating([row.prompt for row in islice(rows, 512)])


def mt_bench(data: Path) -> Ask:
    rows = [json.loads(line) for line in (data / "mt_bench" / "question.jsonl").read_text().splitlines()]
    return generating([row["turns"][0] for row in rows], num_samples=4)


WORKLOADS: Mapping[str, Callable[[Path], Ask]] = {
    "GSM8K 8-shot": gsm8k,
    "BBH 3-shot, three choices scored": bbh,
    "HELM synthetic reasoning": helm,
    "MT-Bench, n=4": mt_bench,
}


def num_computed(runtime: Runtime, requests: Sequence[Request]) -> tuple[int, int, str]:
    """Planned and counted, and the blocks."""
    passes = list[PassRecord]()
    with runtime.open_with_backoff(requests) as (plan, session):
        for block in plan.blocks:
            session.run(block, requests, passes.append)
    facts = f"{len(plan.blocks)} blocks of up to {plan.num_lanes} x {plan.lane_size}"
    spared = num_spared([block.micro_batches for block in plan.blocks], plan.prefixes, plan.placement.sharing_rule)
    planned = sum(len(request.prompt_ids) for request in requests) - spared
    return planned, sum(record.counts.prompt_tokens for record in passes), facts


def main(data: Path, lane_size: int | None) -> None:
    with TemporaryDirectory() as home:
        directory = str(checkpoint(Path(home), data / TOKENIZER))
        for name, made in WORKLOADS.items():
            with Runtime(
                model=directory, max_new_tokens=2, share_prefixes="auto", micro_batch_size=lane_size
            ) as runtime:
                requests, total = made(data)(runtime)
                planned, counted, facts = num_computed(runtime, requests)
            print(
                f"{name}: {len(requests):,} requests in {facts}, alone {total:,} tokens: "
                f"{planned:,} planned, {counted:,} computed, 1/{total / counted:.1f}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
