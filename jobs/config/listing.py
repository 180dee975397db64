"""The settings of a job as the files of `conf/` list them: keys, what they are if nobody says otherwise, what there is
to choose, and the comments that say what each means. Composing them, or importing what the jobs import, takes longer
than a user waits for a TAB or a help text."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import takewhile
from typing import TypeAlias

import yaml

Settings: TypeAlias = Mapping[str, object]

OF_HYDRA = ("hydra", "defaults")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LISTED = re.compile(r"[\w-]+(?: \| [\w-]+)+")  # at the beginning of a comment: what there is to choose


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    """One file of `conf/`. `comments` has what stands before and behind each dotted key; `about` is what stands above
    them all."""

    values: Settings
    comments: Mapping[str, str]
    about: Sequence[str]


class JobSettings:
    """The settings of one job, with the options that are chosen on its command line."""

    def __init__(self, job: str, words: Sequence[str]):
        self._primary = _with_base(read(job_file(job)))
        options = _default_options(self._primary.values)
        chosen = (word.partition("=") for word in words)
        self._options = dict(options) | {key: value for key, _, value in chosen}
        self.groups = list(options)
        self._tree: Settings = {}
        for settings in (self._primary.values, *({group: self._option(group).values} for group in self.groups)):
            self._tree = _merged(self._tree, settings)

    def at(self, key: str) -> object:
        """The value of a key, a mapping for a group, or None where there is no such key; the empty key is all."""
        found: object = self._tree
        for name in filter(None, key.split(".")):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def below(self, key: str) -> list[str]:
        """The names of what stands right below a group, none where it is a value."""
        found = self.at(key)
        return [name for name in found if key or name not in OF_HYDRA] if isinstance(found, Mapping) else []

    def is_group(self, key: str) -> bool:
        return isinstance(self.at(key), Mapping)

    def all_keys(self, key: str = "") -> list[str]:
        """All keys below a group that have a value, dotted."""
        names = self.below(key)
        paths = [f"{key}.{name}" if key else name for name in names]
        return [found for path in paths for found in (self.all_keys(path) if self.below(path) else [path])]

    def chosen(self, group: str) -> str:
        """The name of the option that a group stands at, or of that of the group that it follows."""
        option = self._options[group]
        return self._options.get(option[2:-1], "") if option.startswith("${") else option

    def options(self, group: str) -> list[str]:
        """The names of what a group has to choose from, sorted; those of a `--config-dir` are not among them."""
        return _options(group)

    def about(self, group: str) -> Sequence[str]:
        """The lines at the top of the file of the option that a group stands at."""
        return self._option(group).about

    def meaning(self, key: str) -> str:
        """The comment that explains a key: that of the chosen option, else of the job's own file, else of any other
        option that has one. A key that chooses the option has what stands at the top of that option's file."""
        group, _, name = key.partition(".")
        if group not in self.groups:
            return self._primary.comments.get(key, "")
        option = self._option(group)
        if self.selects(key):
            return " ".join(takewhile(lambda line: line[:1].strip(), option.about))
        others = (read(option_file(group, other)) for other in _options(group))
        found = [option.comments.get(name), self._primary.comments.get(key), *(o.comments.get(name) for o in others)]
        return next((comment for comment in found if comment), "")

    def choices(self, key: str) -> list[str]:
        """What a key may be, as far as that can be listed."""
        group, _, name = key.partition(".")
        if key in self.groups or self.selects(key):
            return _options(group)
        value, comments = self.at(key), [self.meaning(key)]
        if isinstance(value, bool):
            return ["true", "false"]
        if group in self.groups:
            comments += [read(option_file(group, other)).comments.get(name, "") for other in _options(group)]
        for comment in comments:
            if listed := LISTED.match(comment):
                return [*listed[0].split(" | "), *(["null"] if value is None else [])]
        return []

    def selects(self, key: str) -> bool:
        """True for a key whose value names the option that it is in, such as `offload.tier`."""
        group, _, name = key.partition(".")
        return group in self.groups and all(
            read(option_file(group, option)).values.get(name) == option for option in _options(group)
        )

    def _option(self, group: str) -> SettingsFile:
        file = option_file(group, self.chosen(group))
        return read(file) if file.is_file() else SettingsFile(values={}, comments={}, about=())


def job_file(job: str) -> Traversable:
    return files("conf").joinpath(f"{job}.yaml")


def option_file(group: str, option: str) -> Traversable:
    return files("conf").joinpath(group, f"{option}.yaml")


@cache
def _options(group: str) -> list[str]:
    """The names of what a group has to choose from, sorted."""
    names = (file.name for file in files("conf").joinpath(group).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


@cache
def read(file: Traversable) -> SettingsFile:
    """The result is what a file holds, its comments included."""
    text = file.read_text(encoding="utf-8")
    values = yaml.load(text, Loader=LOADER)
    assert isinstance(values, dict), f"{file} holds no mapping"
    comments, about = _comments(text)
    return SettingsFile(values=values, comments=comments, about=about)


def _with_base(settings: SettingsFile) -> SettingsFile:
    """The settings of a job together with those of the job that its defaults begin with, if they do."""
    defaults = settings.values.get("defaults", [])
    assert isinstance(defaults, list)
    bases = [read(job_file(entry)) for entry in defaults if isinstance(entry, str) and entry != "_self_"]
    if not bases:
        return settings
    [base] = bases
    values = {**_merged(base.values, settings.values), "defaults": base.values["defaults"]}
    return SettingsFile(values=values, comments={**base.comments, **settings.comments}, about=settings.about)


def _default_options(primary: Settings) -> dict[str, str]:
    """The groups come in the order of the job's defaults list, each with its option; Hydra's own are left out."""
    defaults = primary.get("defaults", [])
    assert isinstance(defaults, list)
    chosen = [pair for entry in defaults if isinstance(entry, dict) for pair in entry.items()]
    return {group.removeprefix("optional "): option for group, option in chosen if not group.startswith("override ")}


def _merged(settings: Settings, others: Settings) -> Settings:
    merged = dict(settings)
    for key, value in others.items():
        before = merged.get(key)
        merged[key] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged


def _comments(text: str) -> tuple[dict[str, str], list[str]]:
    """The comments of each dotted key, behind it first, then above it; and the lines above the first key.

    A line that is nothing but a comment goes on with the one behind the last key if it begins as far to the right."""
    lines, found = text.splitlines(), dict[str, str]()
    about, done = list[str](), 0
    behind, at, column = list[str](), "", 0
    for key, begin, end in _places(yaml.compose(text, Loader=LOADER), ""):
        above = [line.partition("#") for line in lines[done : begin[0]] if line.lstrip().startswith("#")]
        goes_on = [comment for indent, _, comment in above if behind and len(indent) > column + 1]
        before = [comment for indent, _, comment in above if not (behind and len(indent) > column + 1)]
        found[at] = " ".join(filter(None, [found.get(at, ""), *map(str.strip, goes_on)]))
        if not about and not found.get("", "") and at == "":
            about, before = [line.removeprefix(" ") for line in before], []
        behind = [lines[end[0]][end[1] :].partition("#")[2].strip()] if "#" in lines[end[0]][end[1] :] else []
        found[key] = ". ".join(filter(None, [*behind, " ".join(map(str.strip, before))]))
        at, column, done = key, begin[1], end[0] + 1
    found[at] = " ".join([found.get(at, ""), *_last(lines[done:], column)]).strip()
    return {key: comment for key, comment in found.items() if key and comment}, about


def _last(lines: Sequence[str], column: int) -> list[str]:
    found = [line.partition("#") for line in lines if line.lstrip().startswith("#")]
    return [comment.strip() for indent, _, comment in found if len(indent) > column + 1]


def _places(node: yaml.Node | None, parent: str) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Each dotted key comes with the line and column where it begins, and where its value or a group's name ends."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = f"{parent}.{key.value}" if parent else key.value
        is_open = isinstance(value, yaml.CollectionNode) and not value.flow_style
        end = key.end_mark if is_open else value.end_mark
        yield name, (key.start_mark.line, key.start_mark.column), (end.line, end.column)
        if is_open:
            yield from _places(value, name)
