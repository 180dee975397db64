"""Strict conversion of plain data to frozen dataclasses; each error is one line that names the key."""

import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from runtime.config.sampling import PASSTHROUGH_KEYS, SamplingConfig
from runtime.config.texts import TextField, closest_match, did_you_mean
from runtime.errors import ConfigError

if TYPE_CHECKING:  # needs pyarrow; `jobs.measure` runs without it
    from ..files.publishing import JsonValue

T = TypeVar("T")

TRANSFORMERS = "transformers"  # key of `sampling` that holds `PASSTHROUGH_KEYS`
ARCHITECTURE = "architecture"  # a model file's second group; only some jobs have this setting


def build(cls: type[T], values: Mapping[str, object], prefix: str = "") -> T:
    """Builds an instance of the dataclass `cls` from nested mappings, lists and scalars; missing keys get their
    defaults.

    Stricter than a YAML loader: rejects 3.7 as int, 1 as bool, infinity and NaN as float. Raises ConfigError with the
    dotted key, the value and the allowed values, or the closest known key.
    """
    keys, hints = key_types(cls), field_types(cls)
    for name in values:
        if name not in keys:
            raise ConfigError(unknown_key(f"{prefix}{name}", [f"{prefix}{key}" for key in known_keys(cls)]))
    field_values = values if keys == hints else _flatten_sampling(values, prefix)
    return cls(**{name: _convert(hints[name], value, f"{prefix}{name}") for name, value in field_values.items()})


def known_keys(cls: type) -> list[str]:
    """Dotted keys of the dataclass `cls`, groups included; a dict with arbitrary keys is listed as `name.*`."""
    return list(_known_keys(cls, ""))


def unknown_key(key: str, known: list[str]) -> str:
    """The error message for an unknown key: suggests the closest of `known`, or lists the keys of its group. A known
    key, from a group shared by several jobs, is reported as without effect in this job."""
    if key in known:
        alternative = f"; set {key}.path" if f"{key}.path" in known else ""
        return f"{key} has no effect in this job: leave it out{alternative}"
    parent, _, name = key.rpartition(".")
    group = f"{parent.removesuffix(f'.{TRANSFORMERS}')}.{TRANSFORMERS}"
    if name in PASSTHROUGH_KEYS and group in known:
        return f"unknown key {key}: it is an argument of transformers: write '{group}={{{name}: <value>}}'"
    if f"{parent}.*" in known:
        return f"unknown key {key}: to add it to {parent}, write +{key}=<value>"
    elsewhere = [other for other in known if other.rpartition(".")[2] == name]
    siblings = [other for other in known if other.rpartition(".")[0] == parent]
    close = elsewhere or _closest(name, siblings) or _closest(name, known)
    if close:
        return f"unknown key {key}: did you mean {close[0]}?"
    return f"unknown key {key}: known keys: {', '.join(siblings or [key for key in known if '.' not in key])}"


def flatten(config: object) -> "dict[str, JsonValue]":
    """A dataclass tree as `{"sampling.top_k": 0, ...}`, enums as their values, in field order."""
    return dict(_flatten(to_plain(config), ""))


def to_plain(value: object) -> "JsonValue":
    """A dataclass tree as nested dicts, lists and scalars for JSON and YAML."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    assert value is None or isinstance(value, str | int | float | bool), f"{type(value).__name__} in a config"
    return value


def to_settings(config: object) -> "dict[str, JsonValue]":
    """A config with a group `sampling` as values that `build` accepts."""
    values = to_plain(config)
    assert isinstance(values, dict), "a dataclass"
    if isinstance(sampling := values.get("sampling"), dict):
        passed = {key: value for key in PASSTHROUGH_KEYS if (value := sampling.pop(key)) is not None}
        sampling[TRANSFORMERS] = passed or None
    return values


def key_types(cls: type) -> dict[str, object]:
    """The type of each settable key of the dataclass `cls`: its fields, except `PASSTHROUGH_KEYS`."""
    types = field_types(cls)
    if cls is not SamplingConfig:
        return types
    return {
        **{name: hint for name, hint in types.items() if name not in PASSTHROUGH_KEYS},
        TRANSFORMERS: dict[str, object] | None,
    }


def field_types(cls: type) -> dict[str, object]:
    """The type of each field's value, by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: _value_type(hints[field.name]) for field in fields(cls)}


def _value_type(hint: object) -> object:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is TextField else hint


def _known_keys(cls: type, prefix: str) -> Iterator[str]:
    for name, hint in key_types(cls).items():
        yield f"{prefix}{name}"
        if typing.get_origin(hint) is dict:
            yield f"{prefix}{name}.*"
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _known_keys(hint, f"{prefix}{name}.")


def _flatten_sampling(values: Mapping[str, object], prefix: str) -> Mapping[str, object]:
    """Merges `sampling.transformers` into the other sampling fields. Raises ConfigError for unknown names in it."""
    keys, group = key_types(SamplingConfig), f"{prefix}{TRANSFORMERS}"
    passed = _convert(keys[TRANSFORMERS], values.get(TRANSFORMERS), group) or {}
    assert isinstance(passed, dict)
    known = [*(f"{group}.{name}" for name in PASSTHROUGH_KEYS), *(f"{prefix}{name}" for name in keys)]
    for name in passed:
        if name not in PASSTHROUGH_KEYS:
            raise ConfigError(unknown_key(f"{group}.{name}", known))
    return {**{name: value for name, value in values.items() if name != TRANSFORMERS}, **passed}


def _closest(name: str, known: list[str]) -> list[str]:
    by_name = {key.rpartition(".")[2]: key for key in known}
    match = closest_match(name, by_name)
    return [by_name[match]] if match is not None else []


def _flatten(value: "JsonValue", prefix: str) -> "Iterator[tuple[str, JsonValue]]":
    assert isinstance(value, dict)
    for name, item in value.items():
        if isinstance(item, dict) and item:
            yield from _flatten(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def _convert(hint: object, value: object, key: str) -> object:
    if isinstance(hint, type) and is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _mismatch(hint, value, key)
        return build(hint, value, f"{key}.")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(hint, value, key)
    if origin in (list, tuple):
        if isinstance(value, str):
            value = [value]  # a single text means a list with one item
        if not isinstance(value, list):
            raise _mismatch(hint, value, key)
        return origin(_convert(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not (isinstance(value, Mapping) and all(isinstance(name, str) for name in value)):
            raise _mismatch(hint, value, key)
        of_key, of_item = arguments
        return {_convert(of_key, name, key): _convert(of_item, item, f"{key}.{name}") for name, item in value.items()}
    return _convert_scalar(hint, value, key)


def _convert_union(hint: object, value: object, key: str) -> object:
    options = typing.get_args(hint)
    if value is None and type(None) in options:
        return None
    for option in options:
        try:
            return _convert(option, value, key)
        except ConfigError:
            is_group = isinstance(option, type) and is_dataclass(option) and isinstance(value, Mapping)
            is_only_list = typing.get_origin(option) is list and isinstance(value, list) and len(options) == 2
            if is_group or (is_only_list and type(None) in options):
                raise  # the nested error is more specific
    raise _mismatch(hint, value, key)


def _convert_scalar(hint: object, value: object, key: str) -> object:
    if isinstance(hint, type) and issubclass(hint, Enum) and isinstance(value, str) and value in hint.__members__:
        return hint[value]
    if hint is object or (hint is bool and isinstance(value, bool)):
        return value
    if not isinstance(value, bool):  # a subclass of int
        if hint is str and isinstance(value, str | int):
            return str(value)  # run=7 names a run
        if hint is int and isinstance(value, int):
            return value
        if hint is float and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    raise _mismatch(hint, value, key)


def _mismatch(hint: object, value: object, key: str) -> ConfigError:
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    near = did_you_mean(value, enum_members(hint)) if isinstance(value, str) else ""
    return ConfigError(f"{key} must be {_describe_type(hint)}, got {shown}{near}")


def enum_members(hint: object) -> list[str]:
    """The member names of an enum, or of all enums in a union."""
    enums = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and issubclass(kind, Enum)]
    return [name for enum in enums for name in enum.__members__]


_NAMES = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false", type(None): "null"}


def _describe_type(hint: object) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and hint in _NAMES:
        return _NAMES[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(hint.__members__)}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe_type(option) for option in arguments)
    if origin in (list, tuple):
        return f"a list, each item {_describe_type(arguments[0])}"
    return "a group of keys"
