"""Generates HELM's synthetic reasoning: the same 11,000 items as HELM, bit for bit, on every machine.

All random numbers come from one `RandomState(42)`, so their order must not change. NumPy guarantees that the numbers of
`RandomState` never change (NEP 19). A prompt has examples from the 1,000 train items, and one item of a split, which
has 5,000.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from ..fields import DatasetFields, EvaluationSplit, ReasoningMode
from ..helm import HELM_KEYS, Item, choose_examples
from ..records import Content
from ..row_rules import CountTokens, InputKind, make_row
from ..rows import Row

SEED = 42
NUM_TRAIN, NUM_VALID, NUM_TEST = 1000, 5000, 5000
INSTRUCTIONS = "Please solve the following problem.\n"

_SYMBOLS = ("X", "Y", "Z")
_OPERATORS = ("+", "-", "*", "=")
_ANIMALS = "zebra cobra stork penguin shark lion buffalo whale seal eagle horse rat"
_FRUITS = "apple peach watermelon banana grape kiwi pear strawberry blueberry blackberry"
_WORDS = (*_ANIMALS.split(), *_FRUITS.split())
_NUM_DECOYS = 3  # wrong rules


def read_reasoning(config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
    """Yields rows with generated prompts. Reads no input."""
    prompts = build_prompts(config.mode, config.num_examples, config.trial, config.split)
    name = config.mode.value if config.split is EvaluationSplit.test else f"{config.mode.value}-{config.split.value}"
    for index, item in enumerate(prompts):
        content = Content(prompt=item.input, reference=item.answer)
        yield make_row(index, f"{name}-{index}", content, {}, config)


KINDS = {"helm_synthetic_reasoning": InputKind(rows=read_reasoning, keys=HELM_KEYS | {"mode", "split"})}


def build_prompts(
    mode: ReasoningMode, num_examples: int, trial: int, split: EvaluationSplit = EvaluationSplit.test
) -> Iterator[Item]:
    """Yields the items of a split in order. Each `input` is a complete prompt, which ends in `Target:`."""
    items = generate_items(mode)
    train = list(islice(items, NUM_TRAIN))
    examples = [_block(item, f" {item.answer}\n") for item in choose_examples(train, num_examples, trial)]
    is_test = split is EvaluationSplit.test
    # `items` continues after the train items: first validation, then test.
    for item in islice(items, NUM_VALID, None) if is_test else islice(items, NUM_VALID):
        yield Item(input="\n".join([INSTRUCTIONS, *examples, _block(item, "")]), answer=item.answer)


def generate_items(mode: ReasoningMode) -> Iterator[Item]:
    """Yields the 11,000 items: train, then validation, then test."""
    rng = np.random.RandomState(SEED)
    for _ in range(NUM_TRAIN + NUM_VALID + NUM_TEST):
        yield _generate_item(mode, rng)


def _generate_item(mode: ReasoningMode, rng: np.random.RandomState) -> Item:
    """Makes one item. Draws random numbers in HELM's order, also those that `mode` does not use."""
    symbols = _draw(rng, _SYMBOLS, 2, 3)
    operators = _draw(rng, _OPERATORS, 2, 3)
    distinct = sorted(set(symbols))
    pattern = [*symbols, *operators]
    rng.shuffle(pattern)
    substitution = {symbol: " ".join(_draw(rng, _WORDS, 1, 2)) for symbol in distinct}
    other_substitution = {symbol: " ".join(_draw(rng, _WORDS, 1, 2)) for symbol in distinct}
    result = _substitute(pattern, substitution)
    rule = " ".join(pattern)
    if mode is ReasoningMode.pattern_match:
        rules: list[str] = []
        for _ in range(_NUM_DECOYS):
            tokens = [*distinct, *operators]
            rng.shuffle(tokens)
            rules.append(" ".join(tokens))
        rules.append(rule)
        rng.shuffle(rules)
        return Item(input=f"Rules: {' | '.join(rules)} | Result: {result}", answer=rule)
    if mode is ReasoningMode.variable_substitution:
        listed = " , ".join(f'{symbol} by " {words} "' for symbol, words in substitution.items())
        return Item(input=f"Rules: {rule} | Substitutions: {listed}", answer=result)
    other_result = _substitute(pattern, other_substitution)
    return Item(input=f"Two results: {result} | {other_result}", answer=f"Rule: {rule}")


def _draw(rng: np.random.RandomState, choices: tuple[str, ...], low: int, high: int) -> list[str]:
    """Draws a size uniformly from [low, high], then that many choices with replacement."""
    size = rng.randint(low, high + 1)
    return [choices[index] for index in rng.randint(0, len(choices), size)]


def _substitute(pattern: list[str], substitution: dict[str, str]) -> str:
    return " ".join(substitution.get(token, token) for token in pattern)


def _block(item: Item, answer: str) -> str:
    return f"{item.input}\nTarget:{answer}"
