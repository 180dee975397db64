"""Examples for training the bundled model, and examples held back for evaluation."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

from .stories import STORY, STORY_WEIGHT, story
from .tasks import TASKS, Example

HELD_BACK = 10  # every tenth prompt is never trained on
ATTEMPTS = 5 * HELD_BACK  # to find each evaluation example
NUM_PER_TASK, NUM_STORIES, SAMPLE_SEED = 4, 4, 40


def is_held_back(example: Example) -> bool:
    """True if an example is for evaluation only. Depends on the prompt only, so that no question is in both sets."""
    is_closed = example.task != STORY and TASKS[example.task].is_closed
    return not is_closed and zlib.crc32(example.prompt.encode()) % HELD_BACK == 0


def training_examples(seed: int) -> Iterator[Example]:
    """Yields random examples without end; tasks and stories are as frequent as their weights. The seed determines
    them."""
    random = Random(seed)
    names = [*TASKS, STORY]
    weights = [*(task.weight for task in TASKS.values()), STORY_WEIGHT]
    while True:
        example = _make_example(random.choices(names, weights)[0], random)
        if not is_held_back(example):
            yield example


def evaluation_examples(task: str, count: int, seed: int) -> list[Example]:
    """Up to `count` different examples of a task. They are never trained on, except for a closed task."""
    random, examples = Random(f"{task} {seed}"), dict[str, Example]()
    is_closed = task != STORY and TASKS[task].is_closed
    for _ in range(ATTEMPTS * count):
        example = _make_example(task, random)
        if len(examples) < count and (is_closed or is_held_back(example)):
            examples[example.prompt] = example
    return list(examples.values())


def write_prompts(path: Path) -> None:
    """Writes the prompts of dataset=tasks: examples of each task with reference answers, and beginnings of stories
    without references."""
    examples = [example for task in TASKS for example in evaluation_examples(task, NUM_PER_TASK, SAMPLE_SEED)]
    rows = [
        {"id": f"{example.task}-{index % NUM_PER_TASK + 1}", "task": example.task, "prompt": example.prompt}
        | {"reference": example.answer.strip()}
        for index, example in enumerate(examples)
    ]
    stories = evaluation_examples(STORY, NUM_STORIES, SAMPLE_SEED)
    rows += [
        {"id": f"{STORY}-{number}", "task": STORY, "prompt": example.prompt, "reference": None}
        for number, example in enumerate(stories, 1)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _make_example(task: str, random: Random) -> Example:
    return story(random) if task == STORY else TASKS[task].example(task, random)
