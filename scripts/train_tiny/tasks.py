"""Small random tasks with exactly one correct answer."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random

from .words import COLOURS, NAMES, THINGS, WORDS

QUESTION = "Q: {}\nA:"


@dataclass(frozen=True, kw_only=True)
class Example:
    """A training example. `answer` begins with a space. `is_text`: the tokens of the prompt are learned, too."""

    task: str
    prompt: str
    answer: str
    is_text: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """A kind of question. `make`: returns a random question and its answer. `weight`: relative frequency in training.
    `chance`: accuracy of a guess among the possible answers. `is_closed`: there are too few different questions to hold
    some back for evaluation, so accuracy measures what the model has memorized."""

    make: Callable[[Random], tuple[str, str]]
    weight: float
    chance: float = 0.0
    is_closed: bool = False

    def example(self, name: str, random: Random) -> Example:
        question, answer = self.make(random)
        return Example(task=name, prompt=QUESTION.format(question), answer=f" {answer}")


def _add(random: Random) -> tuple[str, str]:
    a, b = _number(random), _number(random)
    return f"What is {a} + {b}?", str(a + b)


def _subtract(random: Random) -> tuple[str, str]:
    small, large = sorted((_number(random), _number(random)))
    return f"What is {large} - {small}?", str(large - small)


def _compare(random: Random) -> tuple[str, str]:
    a, b = random.sample(range(100), 2)
    return f"Which is larger, {a} or {b}?", str(max(a, b))


def _sort(random: Random) -> tuple[str, str]:
    digits = random.sample(range(10), random.randint(3, 5))
    return f"Sort these numbers: {_spaced(digits)}", _spaced(sorted(digits))


def _pattern(random: Random) -> tuple[str, str]:
    start, step = random.randrange(80), random.randrange(1, 31)
    first = [start + step * index for index in range(4)]
    return f"What comes next: {', '.join(map(str, first))}", str(start + 4 * step)


def _copy(random: Random) -> tuple[str, str]:
    words = random.sample(WORDS, random.randint(2, 5))
    return f"Repeat: {_spaced(words)}", _spaced(words)


def _reverse(random: Random) -> tuple[str, str]:
    words = random.sample(WORDS, random.randint(2, 4))
    return f"Say backwards: {_spaced(words)}", _spaced(reversed(words))


def _spell(random: Random) -> tuple[str, str]:
    word = random.choice(WORDS)
    return f"Spell the word {word}.", _spaced(word)


def _facts(random: Random) -> tuple[str, str]:
    """Three people each have a thing; asks for person, thing or color."""
    people = list(zip(random.sample(NAMES, 3), random.sample(COLOURS, 3), random.sample(THINGS, 3), strict=True))
    facts = " ".join(f"{name} has a {colour} {thing}." for name, colour, thing in people)
    name, colour, thing = random.choice(people)
    answers = {
        f"Who has the {thing}?": name,
        f"What does {name} have?": f"a {colour} {thing}",
        f"Which colour is the {thing}?": colour,
    }
    question = random.choice(list(answers))
    return f"{facts} {question}", answers[question]


def _number(random: Random) -> int:
    return random.randrange(random.choice((10, 100)))


def _spaced(items: Iterable[object]) -> str:
    return " ".join(map(str, items))


TASKS: Mapping[str, TrainingTask] = {
    "addition": TrainingTask(make=_add, weight=6),
    "subtraction": TrainingTask(make=_subtract, weight=6),
    "comparison": TrainingTask(make=_compare, weight=2, chance=1 / 2),
    "sorting": TrainingTask(make=_sort, weight=2),
    "pattern": TrainingTask(make=_pattern, weight=3),
    "copying": TrainingTask(make=_copy, weight=2),
    "reversal": TrainingTask(make=_reverse, weight=2),
    "spelling": TrainingTask(make=_spell, weight=1, is_closed=True),
    "facts": TrainingTask(make=_facts, weight=2, chance=1 / 3),
}
