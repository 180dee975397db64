"""Rewrites command-line words to Hydra overrides: unquoted text in text settings, a run's directory as a bare word,
`model=` with a directory or hub id, and the kind of an input from its file extension."""

import re
import typing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

from runtime.config.texts import is_url
from runtime.errors import ConfigError

from .help import option_names
from .typed import ARCHITECTURE, key_types, known_keys, unknown_key

MULTIRUN = ("--multirun", "-m")
# Options of Hydra that take the next word as their value.
VALUE_OPTIONS = frozenset(
    {"--cfg", "-c", "--package", "-p", "--info", "-i", "--experimental-rerun"}
    | {"--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"}
)
OPTIONS = VALUE_OPTIONS | {"--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", *MULTIRUN}
OPTIONS |= {"--shell-completion", "-sc"}
OPTION = re.compile(r"--?[a-zA-Z][\w.-]*")
OTHER_NAMES = {"-q": "quiet=true", "--json": "summary=json", "-o": "out=FILE", "--output": "out=FILE"}
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
ESCAPED = re.compile(r"\\[][,(){}:=\s]")  # an escape of Hydra's grammar: the user has escaped the value
PLAIN_ITEM = re.compile(r"[\w./*@%+|-]+(?: [\w./*@%+|-]+)*")
PATH_NAMES = ("path", "tokenizer", "out", "output_root", "directory", "cache_dir", "run")
GLOB_SIGNS = "*?["
LISTS = (list, tuple)


def rewrite_words(words: Sequence[str], schema: type) -> list[str]:
    """The words as Hydra overrides. `schema`: the job's settings dataclass. Words of a sweep keep their commas and
    choices. Raises ConfigError for a bare word that is not a run's directory, with the word to write instead."""
    hints, is_sweep = _setting_types(schema), any(word in MULTIRUN for word in words)
    has_open_dataset = typing.get_origin(hints.get("dataset")) is dict  # its keys are not in the YAML of the job
    if has_open_dataset:
        from ..datasets.config import DatasetConfig  # needs pyarrow

        hints |= _setting_types(DatasetConfig, "dataset.")
    rewritten = _expand_bare_words([*words], hints)
    if "dataset.prompt" in hints:
        rewritten = expand_prompt(rewritten)
    if "model.path" in hints and ARCHITECTURE not in hints:
        rewritten = [part for word in rewritten for part in _split_mirrors(word, hints)]
        rewritten = [part for word in rewritten for part in _expand_model(word, rewritten, schema)]
    if not is_sweep:
        rewritten = [_quote_text(word, hints) for word in rewritten]
    if "dataset.path" in hints:
        rewritten = infer_dataset_kind(rewritten)
    return [f"++{word}" if has_open_dataset and word.startswith("dataset.") else word for word in rewritten]


def _setting_types(schema: type, prefix: str = "") -> dict[str, object]:
    """The type of each setting, groups excluded, by dotted key."""
    types = dict[str, object]()
    for name, hint in key_types(schema).items():
        if isinstance(hint, type) and is_dataclass(hint):
            types |= _setting_types(hint, f"{prefix}{name}.")
        else:
            types[f"{prefix}{name}"] = hint
    return types


def _options(hint: object) -> set[object]:
    """The members of a union type, or the type itself; `list` for lists of text."""
    types = {*(typing.get_args(hint) or (hint,))} if typing.get_origin(hint) not in LISTS else {hint}
    return {list if typing.get_origin(item) in LISTS and typing.get_args(item)[0] is str else item for item in types}


def _expand_bare_words(words: list[str], hints: dict[str, object]) -> list[str]:
    """Replaces words without `=` by `run=...`, in jobs that read runs."""
    is_value = [False, *(word in VALUE_OPTIONS for word in words)]
    bare = [i for i, word in enumerate(words) if word and "=" not in word and word[0] not in "-+~" and not is_value[i]]
    if not bare:
        return words
    names = [words[i] for i in bare]
    reads_runs = "run" in hints and "model.path" not in hints
    if reads_runs and all(is_url(name) or {*GLOB_SIGNS} & {*name} or Path(name).exists() for name in names):
        value = f"[{','.join(map(quote, names))}]" if len(names) > 1 else quote(names[0])
        return [
            f"run={value}" if i == bare[0] else word for i, word in enumerate(words) if i == bare[0] or i not in bare
        ]
    raise ConfigError(_describe_bare_word(words, bare, hints, reads_runs=reads_runs))


def _describe_bare_word(words: list[str], bare: list[int], hints: dict[str, object], *, reads_runs: bool) -> str:
    word, before = words[bare[0]], words[bare[0] - 1] if bare[0] else ""
    head = f"{word!r} is not key=value"
    key, sign, value = before.partition("=")
    is_text = sign and (key == "prompt" or str in _options(hints.get(key)))
    if is_text and not reads_runs:
        end = next((i for i in range(bare[0], len(words)) if i not in bare), len(words))
        text = " ".join([value, *words[bare[0] : end]])
        return f"{head}: a text with spaces is quoted: {key}={quote(text)}"
    if hints.get(word) is bool:
        return f"{head}: write {word}=true"
    if reads_runs:
        return f"{head}, and there is no run {word}: name a run's directory, as in run=outputs/generate/mine"
    if "dataset.path" in hints and Path(word).is_file():
        return f"{head}: write dataset.path={word}"
    if "model.path" in hints and Path(word).is_dir():
        return f"{head}: write model={word}"
    return f"{head}; --help shows how to call this job"


def _split_mirrors(word: str, hints: dict[str, object]) -> list[str]:
    """`model=[A,B]` and `model.path=[A,B]` as `model.path=A model.mirrors=[B]`. Raises ConfigError if a job reads only
    one."""
    key, sign, value = word.partition("=")
    if key not in ("model", "model.path") or not sign or not (value.startswith("[") and value.endswith("]")):
        return [word]
    first, *others = (item.strip().strip("'\"") for item in value[1:-1].split(","))
    if others and "model.mirrors" not in hints:
        raise ConfigError(f"{word}: this job reads one directory: {key}={first}")
    mirrors = ",".join(quote(str(_expand_home(other))) for other in others)
    return [f"{key}={first}", *([f"model.mirrors=[{mirrors}]"] if others else [])]


def _expand_model(word: str, words: Sequence[str], schema: type) -> list[str]:
    """`model=DIR`, `model=FILE.gguf`, `model=ORG/NAME` and `model=URL` as `model.path=...`."""
    key, sign, value = word.partition("=")
    name = value.strip("'\"")
    is_location = is_url(name) or "/" in name or name.endswith(".gguf") or _expand_home(name).is_dir()
    if (key, sign) != ("model", "=") or not is_location or any(other.startswith("model.path=") for other in words):
        return [word]
    folders = [Path(folder) for option, folder in pairwise(words) if option in ("--config-dir", "-cd")]
    if name in option_names("model") or any((folder / "model" / f"{name}.yaml").exists() for folder in folders):
        return [word]
    path = f"model.path={quote(name if is_url(name) else str(_expand_home(name)))}"
    return ["model=hf", path] if "model.name" in known_keys(schema) else [path]


def _expand_home(path: str) -> Path:
    with suppress(RuntimeError):  # no such user
        return Path(path).expanduser()
    return Path(path)


def _quote_text(word: str, hints: dict[str, object]) -> str:
    """Quotes the value of a text setting, so that Hydra keeps all characters. Values that are quoted, null or
    interpolated stay unchanged."""
    key, sign, value = word.partition("=")
    name = key.lstrip("+")
    types = _options(hints.get(name))
    has_syntax = QUOTED.fullmatch(value) or "${" in value or value.lower() == "null"
    is_utf8 = value.encode(errors="ignore").decode() == value  # otherwise Hydra rejects it
    if not sign or not {str, list} & types or has_syntax or not is_utf8:
        return word
    if value.startswith("~") and name.rpartition(".")[2] in PATH_NAMES:
        value = str(_expand_home(value))
    if list in types and (value.startswith("[") or not value):
        return word
    if list in types and "," in value:
        items = value.split(",")
        return f"{key}=[{value}]" if all(map(PLAIN_ITEM.fullmatch, items)) else f"{key}={quote(value)}"
    return word if ESCAPED.search(value) else f"{key}={quote(value)}"


def expand_prompt(words: list[str]) -> list[str]:
    """Expands `prompt=TEXT` to `dataset=prompt dataset.prompt=...`, with the text quoted for Hydra."""
    expanded = []
    for word in words:
        name, sign, text = word.partition("=")
        if (name, sign) != ("prompt", "="):
            expanded.append(word)
            continue
        expanded += ["dataset=prompt", f"dataset.prompt={quote(text)}"]
    return expanded


def infer_dataset_kind(words: list[str]) -> list[str]:
    """Adds `dataset=KIND` from the file extension of `dataset.path`, unless the words choose a kind."""
    from ..datasets.files import kind_from_suffix  # needs pyarrow, which not every job has

    if any(re.match(r"[+~]*dataset(=|@|\.kind=)", word) for word in words):
        return words
    values = [word.partition("=")[2] for word in words if word.partition("=")[0] == "dataset.path"]
    is_sweep = any(word in words for word in MULTIRUN)
    paths = [path for value in values for path in (value.split(",") if is_sweep else [value])]
    kinds = {kind_from_suffix(path.strip("'\"")) for path in paths}
    if len(kinds) != 1 or None in kinds:
        return words
    # Next to the path: argparse rejects a second group of positionals after an option such as `--cfg job`.
    index = next(i for i, word in enumerate(words) if word.startswith("dataset.path="))
    return [*words[:index], f"dataset={kinds.pop()}", *words[index:]]


def quote(text: str) -> str:
    """Quotes any text so that Hydra reads it back unchanged."""
    escaped = re.sub(r'(\\*)"', lambda match: 2 * match[1] + '\\"', text).replace("${", "\\${")
    escaped += "\\" * (len(escaped) - len(escaped.rstrip("\\")))
    return f'"{escaped}"'


def _suggest_setting(option: str, value: str, keys: Sequence[str]) -> str:
    """The end of a message about an unknown option: the setting that may be meant."""
    setting = OTHER_NAMES.get(option, "")
    name = option.strip("-").replace("-", "_")
    same = [key for key in keys if key.rpartition(".")[2] == name]
    if same:
        return f": did you mean {same[0]}={value}?"
    if setting.partition("=")[0] in keys:
        return f": did you mean {setting}?"
    return "; --help shows them"


def suggest_key(words: list[str], schema: type) -> str | None:
    """The error message for a setting written as an option (`--key`), for an unknown option, or for an `architecture`
    key that Hydra accepts but the job does not use; None for valid words."""
    keys = known_keys(schema)
    for word, after in zip_longest(words, words[1:], fillvalue="VALUE"):
        name, _, value = word.removeprefix("--").partition("=")
        key = name.lstrip("+~")
        if key.partition(".")[0] == ARCHITECTURE:
            if ARCHITECTURE not in keys:
                return unknown_key(key, keys)
            if key == ARCHITECTURE and not value.startswith("{"):
                return f"{word}: architecture has no options: choose a model with model={value or 'OPTION'}"
        if word.startswith("--") and name in keys and name != "run":  # Hydra has an option --run
            return f"{word} is a setting, not an option: write {name}={value or after}"
        option = word.partition("=")[0]
        if OPTION.fullmatch(option) and option not in OPTIONS:
            hint = _suggest_setting(option, value or after, keys)
            return f"unknown option {option}: settings are written key=value{hint}"
        if key == "output" and "out" in keys and value in ("json", "jsonl", "csv", "parquet"):
            return f"{word}: write out=answers.{value} to get the answers as one file"
    return None
