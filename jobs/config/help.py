"""Help texts and shell completion, read from the YAML files in `conf/` and their comments.

Neither Hydra nor the jobs are imported: that would be too slow for TAB completion.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import takewhile
from textwrap import fill
from typing import TypeAlias

import yaml

from runtime.config.texts import did_you_mean
from runtime.errors import ConfigError

from .screen import screen_width
from .slurm import SCRIPTS

Settings: TypeAlias = Mapping[str, object]

HYDRA_KEYS = ("hydra", "defaults")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
CHOICES = re.compile(r"[\w-]+(?: \| [\w-]+)+")  # allowed values, at the start of a comment: `a | b`
COLUMN = 40  # start of the descriptions
LIST_COLUMN, LIST_WIDTH = 13, 100  # of lists of options
ALL = "all"
PLACEHOLDER = re.compile(r"\{(settings|options):? ?([^}]*)\}")  # in a page of `jobs/data/help`
SHELLS = ("bash", "zsh", "fish")
GLOBAL_PACKAGE = "@package _global_"  # Hydra's header of a file with absolute keys, also outside its group
FLAGS = ("--help", "--version", "--multirun", "--cfg")  # completed options: Hydra's common ones, and our own


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    """A parsed file of `conf/`. `comments`: by dotted key, from the lines above a key and after its value. `header`:
    the comment lines above the first key. `extra_values`: keys that an option sets outside its group."""

    values: Settings
    comments: Mapping[str, str]
    header: Sequence[str]
    extra_values: Settings = field(default_factory=dict)


class JobSettings:
    """The settings of one job, with the options chosen on its command line."""

    def __init__(self, job: str, words: Sequence[str]):
        self._primary = read_settings_file(job_file(job))
        defaults = self._primary.values.get("defaults", [])
        assert isinstance(defaults, list)
        for entry in defaults:
            if isinstance(entry, str) and entry != "_self_":  # a job that this one extends
                base, own = read_settings_file(job_file(entry)), self._primary
                values = {**_merge(base.values, own.values), "defaults": (defaults := base.values["defaults"])}
                comments = {**base.comments, **own.comments}
                self._primary = SettingsFile(values=values, comments=comments, header=own.header)
        assert isinstance(defaults, list)
        pairs = [pair for entry in defaults if isinstance(entry, dict) for pair in entry.items()]
        # options by group, in the order of the defaults list, without Hydra's own groups
        options = {group.removeprefix("optional "): name for group, name in pairs if not group.startswith("override ")}
        chosen = (word.partition("=") for word in words)
        self._options: dict[str, str] = options | {key: value for key, _, value in chosen}
        self.groups = list(options)
        self._tree: Settings = self._primary.values
        for group in self.groups:
            file, known = self.selected_file(group), self._primary.values
            extra = {key: value for key, value in file.extra_values.items() if key in known}
            self._tree = _merge(self._tree, {group: file.values, **extra})

    def value_at(self, key: str) -> object:
        """The value of a key: a mapping for a group, None for an unknown key; the empty key is the root."""
        value: object = self._tree
        for name in filter(None, key.split(".")):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def child_names(self, key: str) -> list[str]:
        """The names directly below a group; empty if `key` has a value instead."""
        group = self.value_at(key)
        return [name for name in group if key or name not in HYDRA_KEYS] if isinstance(group, Mapping) else []

    def leaf_keys(self, key: str = "") -> list[str]:
        """Dotted keys of all values below a group."""
        paths = [f"{key}.{name}" if key else name for name in self.child_names(key)]
        return [leaf for path in paths for leaf in (self.leaf_keys(path) if self.child_names(path) else [path])]

    def selected_option(self, group: str) -> str:
        """The option selected for a group; resolves `${other_group}`."""
        option = self._options[group]
        return self._options.get(option[2:-1], "") if option.startswith("${") else option

    def description(self, key: str) -> str:
        """The comment of a key: from the selected option, else the job's file, else any other option. For a key with
        the option's name as value: the first paragraph of the option's header."""
        group, _, name = key.partition(".")
        if group not in self.groups:
            selected = map(self.selected_file, self.groups)
            setters = (file for file in selected if group in file.extra_values)
            return next(filter(None, (file.comments.get(key, "") for file in (self._primary, *setters))), "")
        option = self.selected_file(group)
        if self.names_option(key):
            return " ".join(takewhile(lambda line: line[:1].strip(), option.header))
        others = (read_option(group, other) for other in option_names(group))
        comments = [option.comments.get(name), self._primary.comments.get(key)]
        return next(filter(None, (*comments, *(other.comments.get(name) for other in others))), "")

    def choices(self, key: str) -> list[str]:
        """The allowed values of a key that has a finite list of them; otherwise empty."""
        group, _, name = key.partition(".")
        if key in self.groups or self.names_option(key):
            return option_names(group)
        value, comments = self.value_at(key), [self.description(key)]
        if isinstance(value, bool):
            return ["true", "false"]
        if group in self.groups:
            comments += [read_option(group, other).comments.get(name, "") for other in option_names(group)]
        for comment in comments:
            if listed := CHOICES.match(comment):
                return [*listed[0].split(" | "), *(["null"] if value is None else [])]
        return []

    def names_option(self, key: str) -> bool:
        """True if the value of `key` is the name of its option, as for `offload.tier`."""
        group, _, name = key.partition(".")
        return group in self.groups and all(
            read_option(group, option).values.get(name) == option for option in option_names(group)
        )

    def selected_file(self, group: str) -> SettingsFile:
        """The file of a group's selected option; empty if that file does not exist."""
        option = self.selected_option(group)
        exists = option_file(group, option).is_file()
        return read_option(group, option) if exists else SettingsFile(values={}, comments={}, header=())


def job_file(job: str) -> Traversable:
    return files("conf").joinpath(f"{job}.yaml")


def option_file(group: str, option: str) -> Traversable:
    return files("conf").joinpath(group, f"{option}.yaml")


@cache
def option_names(group: str) -> list[str]:
    """The options of a group, sorted; without options from `--config-dir`."""
    names = (file.name for file in files("conf").joinpath(group).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


@cache
def read_settings_file(file: Traversable) -> SettingsFile:
    """Parses a file of `conf/` with its comments."""
    text = file.read_text(encoding="utf-8")
    values = yaml.load(text, Loader=LOADER)
    assert isinstance(values, dict), f"{file} holds no mapping"
    comments, header = _parse_comments(text)
    return SettingsFile(values=values, comments=comments, header=header)


@cache
def read_option(group: str, option: str) -> SettingsFile:
    """Parses an option's file; its keys are relative to the group."""
    file = read_settings_file(option_file(group, option))
    if GLOBAL_PACKAGE not in file.header:
        return file
    values, extra = file.values[group], {key: value for key, value in file.values.items() if key != group}
    assert isinstance(values, dict), f"{option} of {group} holds no mapping"
    comments = {key.removeprefix(f"{group}."): comment for key, comment in file.comments.items()}
    header = [line for line in file.header if line != GLOBAL_PACKAGE]
    return SettingsFile(values=values, comments=comments, header=header, extra_values=extra)


def _merge(settings: Settings, others: Settings) -> Settings:
    merged = dict(settings)
    for key, value in others.items():
        before = merged.get(key)
        merged[key] = _merge(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged


def _parse_comments(text: str) -> tuple[dict[str, str], list[str]]:
    """Returns the comment of each dotted key (the one after its value, then the one above it), and the header lines.

    A comment line with deeper indentation than its key continues the comment after the key's value.
    """
    lines, comments = text.splitlines(), dict[str, str]()
    header, done = list[str](), 0
    trailing, last_key, column = list[str](), "", 0
    for key, begin, end in _key_positions(yaml.compose(text, Loader=LOADER), ""):
        between = [line.partition("#") for line in lines[done : begin[0]] if line.lstrip().startswith("#")]
        continued = [comment for indent, _, comment in between if trailing and len(indent) > column + 1]
        above = [comment for indent, _, comment in between if not (trailing and len(indent) > column + 1)]
        comments[last_key] = " ".join(filter(None, [comments.get(last_key, ""), *map(str.strip, continued)]))
        if not header and not comments.get("", "") and last_key == "":
            header, above = [line.removeprefix(" ") for line in above], []
        trailing = [lines[end[0]][end[1] :].partition("#")[2].strip()] if "#" in lines[end[0]][end[1] :] else []
        comments[key] = ". ".join(filter(None, [*trailing, " ".join(map(str.strip, above))]))
        last_key, column, done = key, begin[1], end[0] + 1
    rest = [line.partition("#") for line in lines[done:] if line.lstrip().startswith("#")]
    continued = [comment.strip() for indent, _, comment in rest if len(indent) > column + 1]
    comments[last_key] = " ".join([comments.get(last_key, ""), *continued]).strip()
    return {key: comment for key, comment in comments.items() if key and comment}, header


def _key_positions(node: yaml.Node | None, parent: str) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Yields each dotted key with the (line, column) of its start, and of the end of its value or group name."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = f"{parent}.{key.value}" if parent else key.value
        is_open = isinstance(value, yaml.CollectionNode) and not value.flow_style
        end = key.end_mark if is_open else value.end_mark
        yield name, (key.start_mark.line, key.start_mark.column), (end.line, end.column)
        if is_open:
            yield from _key_positions(value, name)


def help_text(job: str, words: Sequence[str]) -> str:
    """The help page of a job, or the descriptions of the groups and keys in `words`; `all` lists everything. Words with
    a `=` select options, as for a run. Raises ConfigError for an unknown group or key."""
    settings = JobSettings(job, [word for word in words if "=" in word])
    topics = [word for word in words if "=" not in word and not word.startswith("-")]
    if topics:
        return "\n\n".join(part for topic in topics for part in _describe_topic(settings, topic))
    page = files("jobs").joinpath("data", "help", f"{job}.txt").read_text(encoding="utf-8")

    def fill_placeholder(match: re.Match[str]) -> str:
        """Replaces `{settings}`, `{settings: KEYS}`, or `{options: GROUP}` (selected option first)."""
        kind, names = match[1], match[2]
        if kind == "settings":
            return "\n".join(_format_setting(settings, key) for key in names.split() or settings.leaf_keys())
        default = settings.selected_option(names)
        text = ", ".join([default, *(option for option in option_names(names) if option != default)])
        indent = " " * LIST_COLUMN
        width = min(LIST_WIDTH, screen_width())
        return fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False).lstrip()

    return PLACEHOLDER.sub(fill_placeholder, page).rstrip("\n")


def _describe_topic(settings: JobSettings, topic: str) -> Iterator[str]:
    if topic == ALL:
        yield "\n".join(
            _format_setting(settings, key) for key in settings.child_names("") if not settings.child_names(key)
        )
        for name in settings.child_names(""):
            if settings.child_names(name):
                yield from _describe_topic(settings, name)
    elif topic in settings.groups:
        yield "\n".join([f"{topic}=OPTION, one of", *_option_lines(settings, topic), *_setting_lines(settings, topic)])
    elif settings.child_names(topic):
        meaning = fill(
            f"{topic}: {settings.description(topic)}".removesuffix(": "), screen_width(), break_on_hyphens=False
        )
        yield "\n".join([meaning, *_setting_lines(settings, topic)])
    elif topic in settings.leaf_keys():
        yield _format_setting(settings, topic)
    else:
        near = did_you_mean(topic, [*settings.child_names(""), *settings.leaf_keys(), ALL])
        raise ConfigError(f"no group or setting is named {topic}{near}; --help all lists them")


def _option_lines(settings: JobSettings, group: str) -> Iterator[str]:
    """Yields a line for each option, then the header of the selected option's file."""
    selected = settings.selected_option(group)
    for option in option_names(group):
        first_sentence = re.split(r"(?<=\.) ", " ".join(read_option(group, option).header), maxsplit=1)[0]
        yield _two_columns(f"  {option}{' (chosen)' if option == selected else ''}", first_sentence, 24)
    header = settings.selected_file(group).header
    if len(header) > 1:
        yield from (f"\n{group}={selected}", *header)


def _setting_lines(settings: JobSettings, group: str) -> list[str]:
    keys = [key for key in settings.leaf_keys(group) if not settings.names_option(key)]
    return ["\nSettings", *(_format_setting(settings, key) for key in keys)] if keys else []


def format_value(value: object) -> str:
    """Formats a value as on a command line."""
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")


def _format_setting(settings: JobSettings, key: str) -> str:
    return _two_columns(f"  {key}={format_value(settings.value_at(key))}", settings.description(key), COLUMN)


def _two_columns(left: str, right: str, column: int) -> str:
    """Appends `right`, wrapped, as a second column; below `left` if `left` is too long."""
    indent = " " * column
    text = fill(right, screen_width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if not right:
        return left
    return f"{left}\n{text}" if len(left) >= column else left + text[len(left) :]


def completion_output(words: Sequence[str], commands: Iterable[str]) -> str | None:
    """The output of `weightstream completion SHELL` (its script) or `completion answer WORD ...` (one completion per
    line); None for other words."""
    match words:
        case [shell] if shell in SHELLS:
            return files("jobs").joinpath("data", f"completion.{shell}").read_text(encoding="utf-8")
        case ["answer", *command_words]:
            return "".join(f"{word}\n" for word in completions(command_words, commands))
        case _:
            return None


def completions(words: Sequence[str], commands: Iterable[str]) -> list[str]:
    """Completions of the last of `words`, as whole words; a word that ends in `=` or `.` needs more input.

    `words` exclude the program's name; the last one, at the cursor, may be empty. Returns nothing for an unknown job
    and for values that cannot be listed.
    """
    *before, word = words or [""]
    if not before:
        return _with_prefix(word, (*commands, "--help", "--version"))
    if before == ["completion"]:
        return _with_prefix(word, SHELLS)
    if before == ["slurm"]:
        return _with_prefix(word, SCRIPTS)
    if before == ["help"]:
        return _with_prefix(word, commands)
    if not job_file(before[0]).is_file():
        return []
    settings = JobSettings(before[0], before[1:])
    if "=" in word:
        key = word.partition("=")[0]
        return _with_prefix(word, [*FLAGS, *(f"{key}={value}" for value in settings.choices(key))])
    parent, keys = word.rpartition(".")[0], list[str]()
    for name in settings.child_names(parent):  # a group completes to `group=` and `group.`
        key = f"{parent}.{name}" if parent else name
        is_group = isinstance(settings.value_at(key), Mapping)
        keys += [f"{key}="] if not is_group or key in settings.groups else []
        keys += [f"{key}."] if is_group else []
    return _with_prefix(word, [*FLAGS, *keys])


def _with_prefix(word: str, candidates: Iterable[str]) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(word)]
