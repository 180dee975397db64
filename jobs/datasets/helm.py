"""What HELM's scenarios share: items with one answer, and the choice of in-context examples."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar

HELM_KEYS = frozenset({"trial", "num_examples"})


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question and its answer, as one scenario's split holds them."""

    input: str
    answer: str


ItemT = TypeVar("ItemT", bound=Item)


def choose_examples(items: Sequence[ItemT], count: int, trial: int) -> list[ItemT]:
    """HELM's in-context examples: `count` of `items`, or all when there are fewer; the same for all prompts of a trial.

    Answers take turns, the most frequent first, ties in random order; on its turn an answer gives up one random item.
    The draws are those of Python's `random` seeded with `trial`.
    """
    rng = random.Random(trial)
    items_of: dict[str, list[ItemT]] = defaultdict(list)
    for item in items:
        items_of[item.answer].append(item)
    turns = cycle(_order_answers(items_of, rng))
    examples: list[ItemT] = []
    while len(examples) < min(count, len(items)):
        group = items_of[next(turns)]
        if group:
            examples.append(group.pop(rng.randrange(len(group))))
    return examples


def _order_answers(items_of: Mapping[str, Sequence[Item]], rng: random.Random) -> list[str]:
    answers_by_size: dict[int, list[str]] = defaultdict(list)
    for answer in sorted(items_of):
        answers_by_size[len(items_of[answer])].append(answer)
    ordered: list[str] = []
    for size in sorted(answers_by_size, reverse=True):
        rng.shuffle(answers_by_size[size])
        ordered += answers_by_size[size]
    return ordered
