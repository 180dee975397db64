"""What may come next on a `millrace` command line, for a shell's TAB. Settings are read off the files of `conf/`:
composing them, or importing what the jobs import, takes longer than a user waits for a TAB."""

import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TypeAlias

import yaml

from runtime.config import RuntimeConfig

from .typed import enum_members, field_types

Settings: TypeAlias = Mapping[str, object]

SHELLS = ("bash", "zsh", "fish")
FLAGS = ("--help", "--multirun", "--cfg")  # Hydra's, of which a user has a use
OF_HYDRA = ("hydra", "defaults")


def script_or_answer(words: Sequence[str], commands: Iterable[str]) -> str | None:
    """The name of one of `SHELLS` gives the script that it sources; `answer WORD ...`, which that script asks at each
    TAB, gives the `completions` of these words, one a line. The result is None for any other words."""
    match words:
        case [shell] if shell in SHELLS:
            return files("jobs").joinpath("data", f"completion.{shell}").read_text(encoding="utf-8")
        case ["answer", *typed]:
            return "".join(f"{word}\n" for word in completions(typed, commands))
        case _:
            return None


def completions(words: Sequence[str], commands: Iterable[str]) -> list[str]:
    """The result is what the last of `words` can become, as whole words; those that end in `=` or `.` want more.

    `words` stand behind the name of the program, and the last of them, which may be empty, is at the cursor; `commands`
    may come first. The result is empty for a job that is not known and for values that no one can list."""
    *before, word = words or [""]
    if not before:
        return _those_that_begin(word, (*commands, "--help", "--version"))
    if before == ["completion"]:
        return _those_that_begin(word, SHELLS)
    settings = files("conf").joinpath(f"{before[0]}.yaml")
    if not settings.is_file():
        return []
    job = _JobSettings(_read(settings), before[1:])
    return _those_that_begin(word, [*FLAGS, *(job.values(word) if "=" in word else job.keys(word))])


def _those_that_begin(word: str, candidates: Iterable[str]) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(word)]


class _JobSettings:
    """The settings of one job, with the options that are chosen on its command line."""

    def __init__(self, primary: Settings, chosen: Sequence[str]):
        self._options = dict(_default_options(primary))
        self._options |= {key: value for key, _, value in (word.partition("=") for word in chosen)}
        self._groups = [group for group, _ in _default_options(primary)]
        self._tree: Settings = {}
        for settings in (primary, *({group: self._option(group)} for group in self._groups)):
            self._tree = _merged(self._tree, settings)

    def keys(self, word: str) -> Iterator[str]:
        """These are the settings of the group that `word` has reached; a group takes an option too, behind `=`."""
        parent = word.rpartition(".")[0]
        below, prefix = self._at(parent), f"{parent}." if parent else ""
        for name, value in below.items() if isinstance(below, Mapping) else ():
            if prefix or name not in OF_HYDRA:
                is_group = isinstance(value, Mapping)
                if not is_group or prefix + name in self._groups:
                    yield f"{prefix}{name}="
                if is_group:
                    yield f"{prefix}{name}."

    def values(self, word: str) -> Iterator[str]:
        """Each result is `<key>=<value>`, for every value of the key in `word`, as far as they can be listed."""
        key = word.partition("=")[0]
        if key in self._groups:
            names = [file.name for file in _folder(key).iterdir()]
            values = sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))
        else:
            values = _choices(key) or (["true", "false"] if isinstance(self._at(key), bool) else [])
        return (f"{key}={value}" for value in values)

    def _option(self, group: str) -> Settings:
        """The chosen file of a group is read, or that of the group that it follows; a missing one is empty."""
        option = self._options[group]
        if option.startswith("${"):
            option = self._options.get(option[2:-1], "")
        file = _folder(group).joinpath(f"{option}.yaml")
        return _read(file) if file.is_file() else {}

    def _at(self, key: str) -> object:
        found: object = self._tree
        for name in filter(None, key.split(".")):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _default_options(primary: Settings) -> Iterator[tuple[str, str]]:
    """The groups come in the order of the job's defaults list, each with its option; Hydra's own are left out."""
    defaults = primary.get("defaults", [])
    assert isinstance(defaults, list)
    for entry in defaults:
        if isinstance(entry, dict):
            [(group, option)] = entry.items()
            if not group.startswith("override "):
                yield group.removeprefix("optional "), option


def _merged(settings: Settings, others: Settings) -> Settings:
    merged = dict(settings)
    for key, value in others.items():
        before = merged.get(key)
        merged[key] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged


def _choices(key: str) -> list[str]:
    """The result is the members of an enum in the engine's settings, with `null` where the key may be null."""
    hint: object = RuntimeConfig
    for name in key.split("."):
        hint = field_types(hint).get(name) if isinstance(hint, type) and is_dataclass(hint) else None
    members = enum_members(hint)
    return [*members, *(["null"] if members and typing.get_args(hint) else [])]


def _folder(group: str) -> Traversable:
    return files("conf").joinpath(group)


@cache
def _read(file: Traversable) -> Settings:
    values = yaml.load(file.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert isinstance(values, dict), f"{file} holds no mapping"
    return values
