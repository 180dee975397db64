"""What `--help` prints of a job: its page of `jobs/data/help`, with settings and options as `conf/` has them, and all
that is to be said of a group or a key for who asks for one: `millrace help policy`."""

import json
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from textwrap import fill

from runtime.config.text_field import did_you_mean
from runtime.errors import ConfigError

from .listing import JobSettings, option_file, read

WIDTH, COLUMN = 120, 40  # of a line, and where what a key means begins
ALL = "all"
PLACEHOLDER = re.compile(r"\{(settings|options):? ?([^}]*)\}")


def help_text(job: str, words: Sequence[str]) -> str:
    """The page of a job, or what there is to say of the groups and keys among `words`; `all` is everything. Words with
    a `=` choose options, as in a run.

    Raises ConfigError in one line for a word that is neither."""
    settings = JobSettings(job, [word for word in words if "=" in word])
    topics = [word for word in words if "=" not in word and not word.startswith("-")]
    if topics:
        return "\n\n".join(part for topic in topics for part in _about(settings, topic))
    page = files("jobs").joinpath("data", "help", f"{job}.txt").read_text(encoding="utf-8")
    return PLACEHOLDER.sub(lambda place: _filled(settings, place[1], place[2]), page).rstrip("\n")


def _filled(settings: JobSettings, what: str, names: str) -> str:
    """The text for a place in a page: `{settings}` or `{settings: KEYS}`, and `{options: GROUP}`, the default first."""
    if what == "settings":
        return "\n".join(_entry(settings, key) for key in names.split() or settings.all_keys())
    default = settings.chosen(names)
    text = ", ".join([default, *(option for option in settings.options(names) if option != default)])
    return fill(text, WIDTH - 20, subsequent_indent=" " * 13, break_on_hyphens=False)


def _about(settings: JobSettings, topic: str) -> Iterator[str]:
    if topic == ALL:
        yield "\n".join(_entry(settings, key) for key in settings.below("") if not settings.below(key))
        for name in settings.below(""):
            if settings.below(name):
                yield from _about(settings, name)
    elif topic in settings.groups:
        yield "\n".join([f"{topic}=OPTION, one of", *_options(settings, topic), *_below(settings, topic)])
    elif settings.below(topic):
        meaning = fill(f"{topic}: {settings.meaning(topic)}".removesuffix(": "), WIDTH, break_on_hyphens=False)
        yield "\n".join([meaning, *_below(settings, topic)])
    elif topic in settings.all_keys():
        yield _entry(settings, topic)
    else:
        near = did_you_mean(topic, [*settings.below(""), *settings.all_keys(), ALL])
        raise ConfigError(f"no group and no setting is called {topic}{near}; --help all lists them")


def _options(settings: JobSettings, group: str) -> Iterator[str]:
    """A line for each option, and all that the chosen one's file begins with."""
    chosen = settings.chosen(group)
    for option in settings.options(group):
        about = " ".join(read(option_file(group, option)).about)
        first = re.split(r"(?<=\.) ", about, maxsplit=1)[0]
        yield _columns(f"  {option}{' (chosen)' if option == chosen else ''}", first, 24)
    about = settings.about(group)
    if len(about) > 1:
        yield from (f"\n{group}={chosen}", *about)


def _below(settings: JobSettings, group: str) -> list[str]:
    keys = [key for key in settings.all_keys(group) if not settings.selects(key)]
    return ["\nSettings", *(_entry(settings, key) for key in keys)] if keys else []


def _entry(settings: JobSettings, key: str) -> str:
    value = settings.at(key)
    shown = value if isinstance(value, str) else json.dumps(value).replace('"', "")
    return _columns(f"  {key}={shown}", settings.meaning(key), COLUMN)


def _columns(left: str, right: str, column: int) -> str:
    """`right` stands beside `left`, or below it where that is too long."""
    indent = " " * column
    text = fill(right, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if not right:
        return left
    return f"{left}\n{text}" if len(left) >= column else left + text[len(left) :]
