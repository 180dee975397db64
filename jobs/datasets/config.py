"""The settings of a dataset, and the function that reads it, `read_rows`.

`KINDS` has the kinds of input by name, from the modules in `kinds/`. conf/dataset/*.yaml has the same keys as
`DatasetConfig`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from importlib import import_module
from itertools import islice
from pathlib import Path
from pkgutil import iter_modules

from runtime.config.texts import is_url
from runtime.errors import DatasetError, require
from runtime.units import format_count

from . import kinds
from .fields import MAX_ROWS, DatasetFields
from .files import kind_from_suffix, other_kind_hint
from .row_rules import CountTokens, InputKind
from .rows import (
    Row,
    number_rows,
    reject_bad_rows,
    repeat_rows,
    resolve_duplicates,
    target_problem,
    warn_about_empty_fields,
)

KINDS: Mapping[str, InputKind] = {
    name: kind
    for module in iter_modules(kinds.__path__)
    for name, kind in import_module(f"{kinds.__name__}.{module.name}").KINDS.items()
}
_KIND_SPECIFIC_KEYS = frozenset[str]().union(*(kind.keys for kind in KINDS.values()))


class DatasetKind(Enum):
    """The names of kinds, as in `KINDS`."""

    vars().update({name: name for name in KINDS})


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(DatasetFields):
    """Settings of one dataset. Raises ConfigError if a key is set that the kind does not use."""

    kind: DatasetKind = DatasetKind["tasks"]

    def __post_init__(self) -> None:
        kind, name = KINDS[self.kind.name], f"dataset.kind={self.kind.value}"
        for field in fields(self):
            is_unused = field.name in _KIND_SPECIFIC_KEYS - kind.keys
            is_set = getattr(self, field.name) != field.default
            others = ", ".join(other for other, spec in KINDS.items() if field.name in spec.keys)
            error = f"dataset.{field.name} is not supported by {name}, only by dataset={others}"
            if is_unused and is_set and field.name == "path" and (other := kind_from_suffix(self.path or "")):
                error += f"; did you mean dataset={other}?"
            require(not (is_unused and is_set), error)
        require("path" not in kind.keys or bool(self.path), f"{name} needs {kind.needs}")
        error = f"dataset.chat_template is not supported by {name}: each request defines whether it is a chat"
        require(not (kind.has_chats and self.chat_template), error)
        is_chat = kind.has_chats or self.chat_template
        for key in self.chat_only_keys:
            require(is_chat, f"dataset.{key} needs dataset.chat_template=true")
        is_default = (self.num_examples, self.trial) == (DatasetFields.num_examples, DatasetFields.trial)
        require(
            "few_shot_path" not in kind.keys or self.few_shot_path is not None or is_default,
            "dataset.num_examples and dataset.trial need dataset.few_shot_path",
        )
        require("prompt" not in kind.keys or bool(self.prompt), f"{name} needs dataset.prompt='TEXT'")
        require(
            self.window_rows is None or self.repeat == 1,
            f"dataset.window_rows does not support dataset.repeat={self.repeat}: set sampling.n instead",
        )
        super().__post_init__()

    @property
    def source_name(self) -> str:
        """The name of the input in messages: its path, or its kind if it has no path."""
        return self.path or f"dataset={self.kind.value}"


def require_usable(config: DatasetConfig, rows: Iterable[Row], problem: Callable[[Row], str | None]) -> None:
    """Raises DatasetError if every row has a problem, or if there are no rows. Reads `rows` up to the first without a
    problem. `problem`: returns why a row cannot be used, or None."""
    num_rows, first_reason = 0, ""
    for row in rows:
        reason = problem(row)
        if reason is None:
            return
        num_rows, first_reason = num_rows + 1, first_reason or reason
    if not num_rows:
        raise _no_rows_error(config)
    raise DatasetError(
        f"none of {format_count(num_rows, 'row')} of {config.source_name} can be used; the first: {first_reason}"
        f"{input_kind_hint(config)}"
    )


def _no_rows_error(config: DatasetConfig) -> DatasetError:
    return DatasetError(f"dataset.path={config.path} has no rows (dataset.kind={config.kind.value})")


def check_first_rows(config: DatasetConfig, target_field: str | None = None) -> None:
    """Reads a local input up to its first usable row, so that a wrong setting fails before slow imports. A row without
    `target_field` is not usable. Raises DatasetError."""
    path, kind = config.path, config.kind.name
    if (path is not None and is_url(path)) or kind == "hub" or config.window_tokens is not None:
        return
    rows = islice(KINDS[kind].rows(config, None), config.limit)
    if kind == "openai_batch":  # a file may consist of bad lines only: each gets an error in the output
        next(rows, None)
    else:
        require_usable(
            config, rows, lambda row: row.error if target_field is None else target_problem(row, target_field)
        )


def input_kind_hint(config: DatasetConfig) -> str:
    """A hint for an input without usable rows: the kind that its first file looks like. Empty if the file is of this
    kind or of no known kind."""
    kind = config.kind.name
    if not config.path or is_url(config.path) or kind == "hub":
        return ""
    path = Path(config.path).expanduser()
    files = [path] if path.is_file() else [file for file in sorted(path.glob("[!._]*")) if file.is_file()]
    return other_kind_hint(files[0], kind if kind in ("csv", "parquet") else "jsonl") if files else ""


def read_rows(config: DatasetConfig, *, count_tokens: CountTokens | None = None, encodes: bool = False) -> list[Row]:
    """Reads all rows of a dataset, with `limit`, `repeat` and `dedupe` applied. Their order depends on the input only.

    `encodes`: True for jobs that encode instead of generate. `count_tokens`: counts the tokens of a text; required with
    `dataset.window_tokens`.

    Raises ConfigError without a required `count_tokens`. Raises DatasetError if the dataset cannot be used: not found,
    unreadable, empty, a missing column, duplicate ids (`dedupe=refuse`), a bad row (`on_bad_row=fail`).
    """
    rows = list(islice(KINDS[config.kind.name].rows(config, count_tokens), config.limit))
    if not rows:
        raise _no_rows_error(config)
    require(
        len(rows) * config.repeat <= MAX_ROWS,
        f"dataset.repeat={config.repeat:,} times {len(rows):,} rows is above the limit of {MAX_ROWS:,} rows per run",
    )
    rows = KINDS[config.kind.name].reject_wrong_endpoints(rows, encodes)
    reject_bad_rows(rows, config.on_bad_row)
    warn_about_empty_fields(rows, config)
    return number_rows(resolve_duplicates(repeat_rows(rows, config.repeat), config.dedupe))
