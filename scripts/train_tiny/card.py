"""What is published beside the bundled model: what it is, how it was made, and the table of its training."""

import platform
from collections.abc import Sequence

import torch

from .stories import STORY
from .tasks import TASKS
from .training import Recipe, TrainingProgress

TEXT = """# The bundled model

A Llama of {num_parameters:,} parameters in bfloat16, with a tokenizer of {vocab_size} ids, both made by one command
from generated tasks and stories (`scripts/train_tiny`); no text of anybody else is in it. It is `model=tiny`. It knows
a few small tasks and nothing of the world.

    python -m scripts.train_tiny DIR

{recipe}

The same command gives the same bits on the same machine. On another kind of processor, with another number of threads
or another version of torch, sums are rounded in another order, and after thousands of steps weights differ in more than
their last bits; accuracies come out alike, not equal.

Accuracy: the share of {num_asked} questions of a task, none of which was trained on (but spelling: each word was),
whose whole answer is what greedy decoding says; of stories, the share of tokens that are the likeliest. The last line
is of the weights as they lie here. Loss: nats per token, the mean of the steps since the line before. A guess among
the answers that a question leaves is right for comparison in {comparison:.0%}, for facts in {facts:.0%}, else hardly
ever.

{table}

Torch {torch}, {threads} thread, {machine}; processor time includes what asking takes.
"""


def model_card(recipe: Recipe, table: Sequence[TrainingProgress], num_parameters: int) -> str:
    """Markdown."""
    return TEXT.format(
        num_parameters=num_parameters,
        vocab_size=recipe.vocab_size,
        recipe=f"Recipe: `{recipe}`",
        num_asked=recipe.num_questions,
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
