"""The bundled model's card: description, recipe and training table."""

import platform
from collections.abc import Sequence

import torch

from .stories import STORY
from .tasks import TASKS
from .training import Recipe, TrainingProgress

TEXT = """# The bundled model

A Llama of {num_parameters:,} parameters in bfloat16, with a tokenizer of {vocab_size} ids. Both are made by one command
from generated tasks and stories (`scripts/train_tiny`), without any other text. It is `model=tiny`. It can do a few
small tasks, and knows nothing of the world.

    python -m scripts.train_tiny DIR

{recipe}

The same command gives the same bits on the same machine. Another kind of processor, number of threads or version of
torch rounds sums in another order. After thousands of steps, weights then differ in more than their last bits, and
accuracies are similar but not equal.

Accuracy: the share of {num_questions} questions of a task that greedy decoding answers completely. No question was
trained on, except for spelling, where each word was. For stories: the share of correct tokens. The last line is of
the published weights. Loss: nats per token, the mean of the steps since the previous line. Accuracy of a guess among
the possible answers: comparison {comparison:.0%}, facts {facts:.0%}, other tasks almost 0%.

{table}

Torch {torch}, {threads} thread, {machine}; processor time includes the evaluations.
"""


def model_card(recipe: Recipe, table: Sequence[TrainingProgress], num_parameters: int) -> str:
    return TEXT.format(
        num_parameters=num_parameters,
        vocab_size=recipe.vocab_size,
        recipe=f"Recipe: `{recipe}`",
        num_questions=recipe.num_questions,
        comparison=TASKS["comparison"].chance,
        facts=TASKS["facts"].chance,
        table=training_table(table),
        torch=torch.__version__,
        threads=recipe.num_threads,
        machine=torch.backends.cpu.get_cpu_capability() + f" on {platform.machine()}",
    )


def training_table(table: Sequence[TrainingProgress]) -> str:
    columns = ("step", "loss", *TASKS, STORY, "processor time")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for line in table:
        shares = (f"{line.accuracy[task]:.1%}" for task in (*TASKS, STORY))
        cells = (str(line.step), f"{line.loss:.3f}", *shares, f"{line.processor_seconds:.0f} s")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
