"""The examples that the bundled model is trained on, and those that are held back to ask it about."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

from .stories import STORY, STORY_WEIGHT, story
from .tasks import TASKS, Example

HELD_BACK = 10  # one prompt in so many is never trained on
ATTEMPTS = 5 * HELD_BACK  # to find an example, until there are none
NUM_PER_TASK, NUM_STORIES, SAMPLE_SEED = 4, 4, 40


def is_held_back(example: Example) -> bool:
    """Whether an example is for asking alone; decided by its prompt, so no question is in both."""
    is_closed = example.task != STORY and TASKS[example.task].is_closed
    return not is_closed and zlib.crc32(example.prompt.encode()) % HELD_BACK == 0


def training_examples(seed: int) -> Iterator[Example]:
    """Examples without end, tasks and stories by their weights; the same ones for the same seed."""
    random = Random(seed)
    names = [*TASKS, STORY]
    weights = [*(task.weight for task in TASKS.values()), STORY_WEIGHT]
    while True:
        example = _make_example(random.choices(names, weights)[0], random)
        if not is_held_back(example):
            yield example


def evaluation_examples(task: str, count: int, seed: int) -> list[Example]:
    """Up to `count` different examples of one task that training never shows; of a closed task, such as it may have
    shown, and fewer where there are no more."""
    random, examples = Random(f"{task} {seed}"), dict[str, Example]()
    is_closed = task != STORY and TASKS[task].is_closed
    for _ in range(ATTEMPTS * count):
        example = _make_example(task, random)
        if len(examples) < count and (is_closed or is_held_back(example)):
            examples[example.prompt] = example
    return list(examples.values())


def write_prompts(path: Path) -> None:
    """The prompts of dataset=tasks: some of each task with their references, and openings of stories with none."""
    examples = [example for task in TASKS for example in evaluation_examples(task, NUM_PER_TASK, SAMPLE_SEED)]
    rows = [
        {"id": f"{example.task}-{place % NUM_PER_TASK + 1}", "task": example.task, "prompt": example.prompt}
        | {"reference": example.answer.strip()}
        for place, example in enumerate(examples)
    ]
    stories = evaluation_examples(STORY, NUM_STORIES, SAMPLE_SEED)
    rows += [
        {"id": f"{STORY}-{place}", "task": STORY, "prompt": example.prompt, "reference": None}
        for place, example in enumerate(stories, 1)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _make_example(task: str, random: Random) -> Example:
    return story(random) if task == STORY else TASKS[task].example(task, random)
