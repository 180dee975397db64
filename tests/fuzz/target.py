"""What a target is: cases made from a number, and what is done with one."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tests.fuzz.mutate import mutated

Files: TypeAlias = Mapping[str, bytes]  # by name, below the directory of a case
Mutation: TypeAlias = Callable[[random.Random, bytes], bytes]


class OutsideError(AssertionError):
    """What was accepted says what its files do not."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """`check` returns where it accepts a directory with the files of a case, and raises our family of errors where it
    refuses; `corpus` are known bad cases; all others are `seeds` of which one file was mutated, `how` by its suffix.

    `home` of a target is a directory that its seeds may lie in; `prepare` fills it once per process.
    """

    name: str
    seeds: Callable[[Path], list[Files]]
    corpus: Callable[[Path], list[Files]]
    check: Callable[[Path, random.Random], None]
    how: Mapping[str, Mutation] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cases:
    """The cases of a target, each by its number."""

    target: Target
    seeds: list[Files]
    corpus: list[Files]

    @staticmethod
    def of(target: Target, home: Path) -> "Cases":
        return Cases(target=target, seeds=target.seeds(home), corpus=target.corpus(home))

    def rng(self, seed: int, number: int) -> random.Random:
        return random.Random(f"{self.target.name} {seed} {number}")

    def files(self, seed: int, number: int) -> Files:
        """The seeds as they are, the corpus, and then mutations without end."""
        known = [*self.seeds, *self.corpus]
        if number < len(known):
            return known[number]
        rng = self.rng(seed, number)
        chosen = rng.choice(self.seeds)
        name = rng.choice(list(chosen))
        how = self.target.how.get(Path(name).suffix, mutated)
        return {**chosen, name: how(rng, chosen[name])}


def write(files: Files, directory: Path) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
