"""Trains a small Llama on tasks and stories with plain torch, and evaluates it at intervals."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .corpus import evaluation_examples, training_examples
from .stories import STORY
from .tasks import TASKS, Example

IGNORED = -100  # ignore_index of torch's cross entropy
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of training. They determine the weights on a given machine. `warmup_share`: fraction of the steps in
    which the learning rate rises; a cosine decay to 0 follows. Optimizer: AdamW."""

    seed: int = 0
    num_steps: int = 4000
    num_rows: int = 8  # in a step
    num_tokens: int = 128  # in a row
    learning_rate: float = 3e-3
    warmup_share: float = 0.05
    weight_decay: float = 0.1
    vocab_size: int = 640
    num_threads: int = 1  # another number changes the last bits of the weights
    num_questions: int = 50  # of each task in an evaluation


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """A line of the training table. `loss`: nats per token, the mean since the previous line. `accuracy`: by task, the
    fraction of answers that are completely correct; for stories, the fraction of correct tokens."""

    step: int
    loss: float
    accuracy: dict[str, float]
    processor_seconds: float


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A model with random weights, in float32."""
    torch.manual_seed(recipe.seed)
    ids = {key: getattr(tokenizer, key) for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE, **ids))


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, every: int
) -> Iterator[TrainingProgress]:
    """Trains `model` in place. Yields a line every `every` steps and at the end, with weights rounded to bfloat16."""
    torch.set_num_threads(recipe.num_threads)
    torch.use_deterministic_algorithms(True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        recipe.learning_rate,
        total_steps=recipe.num_steps,
        pct_start=recipe.warmup_share,
        cycle_momentum=False,
    )
    batches, losses = packed_batches(tokenizer, recipe), list[float]()
    for step in range(1, recipe.num_steps + 1):
        losses.append(_step(model, optimizer, *next(batches)))
        if step < recipe.num_steps:
            schedule.step()
        if step == recipe.num_steps:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.bfloat16())
        if step % every == 0 or step == recipe.num_steps:
            yield TrainingProgress(
                step=step,
                loss=sum(losses) / len(losses),
                accuracy=accuracies(model, tokenizer, recipe.num_questions),
                processor_seconds=time.process_time(),
            )
            losses.clear()


def _step(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor,
) -> float:
    """One optimizer step; returns the loss before it."""
    model.train()
    # Positions that restart at 0 make transformers mask attention between examples.
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def packed_batches(
    tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields batches: tokens, labels and positions, each (rows, tokens). A row is a concatenation of examples, cut at
    its end."""
    examples = training_examples(recipe.seed + 1)
    while True:
        rows = [_packed_row(tokenizer, examples, recipe.num_tokens) for _ in range(recipe.num_rows)]
        tokens, labels, positions = (torch.tensor([row[part] for row in rows]) for part in range(3))
        yield tokens, labels, positions


def _packed_row(
    tokenizer: PreTrainedTokenizerFast, examples: Iterator[Example], num_tokens: int
) -> tuple[list[int], list[int], list[int]]:
    tokens, labels, positions = list[int](), list[int](), list[int]()
    while len(tokens) < num_tokens:
        more_tokens, more_labels = encode(tokenizer, next(examples))
        tokens += more_tokens
        labels += more_labels
        positions += range(len(more_tokens))
    return tokens[:num_tokens], labels[:num_tokens], positions[:num_tokens]


def encode(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[list[int], list[int]]:
    """The tokens of prompt, answer and end of sequence, and their labels. The tokens of questions are not learned."""
    prompt = tokenizer(example.prompt).input_ids
    answer = [*tokenizer(example.answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    prompt_labels = [IGNORED, *prompt[1:]] if example.is_text else [IGNORED] * len(prompt)
    return [*prompt, *answer], [*prompt_labels, *answer]


@torch.no_grad()
def accuracies(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_questions: int) -> dict[str, float]:
    """The fraction of held-back examples that greedy decoding answers completely, by task; for stories, the fraction of
    correct tokens."""
    model.eval()
    shares = dict[str, float]()
    for task in (*TASKS, STORY):
        encoded = [encode(tokenizer, example) for example in evaluation_examples(task, num_questions, seed=1)]
        width = max(len(tokens) for tokens, _ in encoded)
        tokens = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row, _ in encoded])
        labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in encoded])[:, 1:]
        predicted = model(input_ids=tokens, use_cache=False).logits[:, :-1].argmax(-1)
        is_right = (predicted == labels) | (labels == IGNORED)
        share = (
            is_right.all(1).float().mean() if task != STORY else (predicted == labels).sum() / (labels != IGNORED).sum()
        )
        shares[task] = round(share.item(), 4)
    return shares
