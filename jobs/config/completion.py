"""What may come next on a `millrace` command line, for a shell's TAB."""

from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

from .listing import JobSettings, job_file

SHELLS = ("bash", "zsh", "fish")
FLAGS = ("--help", "--version", "--multirun", "--cfg")  # two of ours, and of Hydra's those of which a user has a use


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
    if before == ["help"]:
        return _those_that_begin(word, commands)
    if not job_file(before[0]).is_file():
        return []
    settings = JobSettings(before[0], before[1:])
    return _those_that_begin(word, [*FLAGS, *(_values(settings, word) if "=" in word else _keys(settings, word))])


def _those_that_begin(word: str, candidates: Iterable[str]) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(word)]


def _keys(settings: JobSettings, word: str) -> Iterator[str]:
    """These are the settings of the group that `word` has reached; a group takes an option too, behind `=`."""
    parent = word.rpartition(".")[0]
    for name in settings.below(parent):
        key = f"{parent}.{name}" if parent else name
        if not settings.is_group(key) or key in settings.groups:
            yield f"{key}="
        if settings.is_group(key):
            yield f"{key}."


def _values(settings: JobSettings, word: str) -> Iterator[str]:
    """Each result is `<key>=<value>`, for every value of the key in `word`, as far as they can be listed."""
    key = word.partition("=")[0]
    return (f"{key}={value}" for value in settings.choices(key))
