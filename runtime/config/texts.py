"""Fields of the config dataclasses that may be given as text, as they are on the command line: `tier="nvme"` for
`tier=Tier.nvme`, `model="/data/llama"` for `model=ModelConfig(path="/data/llama")`. What an error says of a wrong
word. And URLs as settings: which texts are some, and which are refused because they would give a secret away.
"""

import re
from collections.abc import Callable, Collection
from difflib import get_close_matches
from enum import Enum
from typing import Any, Generic, TypeGuard, TypeVar
from urllib.parse import urlsplit

from ..errors import ConfigError

T = TypeVar("T")
E = TypeVar("E", bound=Enum)


class TextField(Generic[T]):
    """A descriptor: the field's value is a T, and may be set by a text, which `read` makes a T of or refuses with
    ConfigError, given the dotted key. `kinds` are the types of a T; another value is refused."""

    def __init__(self, default: T, kinds: tuple[type, ...], read: Callable[[str, str], T]):
        self._default, self._kinds, self._read = default, kinds, read

    def __set_name__(self, owner: type, name: str) -> None:
        group = owner.__name__.removesuffix("Config").lower()
        self._name, self._key = name, name if group == "runtime" else f"{group}.{name}"

    def __get__(self, instance: object | None, owner: type) -> T:
        return self._default if instance is None else vars(instance)[self._name]

    def __set__(self, instance: object, value: T | str) -> None:
        if isinstance(value, str):
            value = self._read(self._key, value)
        if not isinstance(value, self._kinds):
            kinds = " or ".join("None" if kind is type(None) else kind.__name__ for kind in self._kinds)
            raise ConfigError(f"{self._key} must be a text or {kinds}, got {value!r}")
        vars(instance)[self._name] = value


def enum_field(default: Enum) -> Any:
    """A field that holds a member of the default's enum. The result is Any, as of the next two functions, because the
    field says its type itself, and a checker takes what stands behind it for the default."""
    kind = type(default)
    return TextField(default, (kind,), lambda key, text: parse_enum(kind, key, text))


def optional_enum_field(kind: type[E]) -> Any:
    """A field that holds a member of `kind`, or None, its default."""
    return TextField[E | None](None, (kind, type(None)), lambda key, text: parse_enum(kind, key, text))


def group_field(default: T, read: Callable[[str], T]) -> Any:
    """A field that holds a config dataclass of the default's type."""
    return TextField(default, (type(default),), lambda _, text: read(text))


def parse_enum(kind: type[E], key: str, text: str) -> E:
    """The member of that name. Raises ConfigError naming the key, all members and the nearest one."""
    if text not in kind.__members__:
        names, near = ", ".join(kind.__members__), did_you_mean(text, kind.__members__)
        raise ConfigError(f"{key} must be one of {names}, got {text!r}{near}")
    return kind[text]


def closest_match(word: str, known: Collection[str]) -> str | None:
    """The one of `known` that `word` is nearly, if there is one, in capitals or not."""
    by_folded = {each.casefold(): each for each in reversed([*known])}
    near = get_close_matches(word.casefold(), by_folded, n=1)
    return by_folded[near[0]] if near else None


def did_you_mean(word: str, known: Collection[str]) -> str:
    """What an error says behind a wrong word; empty where nothing is near."""
    near = closest_match(word, known)
    return f": did you mean {near}?" if near is not None else ""


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:::|://)")


def is_url(text: str | None) -> TypeGuard[str]:
    """Whether `text` names a place by a scheme, as `s3://bucket/name`: a path otherwise."""
    return text is not None and _SCHEME.match(text) is not None


def require_plain_url(text: str | None, key: str) -> None:
    """Raises ConfigError, without the secret, for a URL with a password or a signature, which logs and manifests would
    keep, and for one of several schemes. What is no URL passes."""
    if text is None or not is_url(text):
        return
    if "::" in text:
        raise ConfigError(f"{key}: a URL of one scheme is read, as s3://bucket/name, and none that is chained by '::'")
    parts = urlsplit(text)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    where = "give them in the environment, or in the files where the store's own tools look for them"
    if "@" in parts.netloc and parts.scheme != "hf":
        raise ConfigError(f"{key}={shown} holds credentials, which would be kept in logs and in the run: {where}")
    if parts.query or parts.fragment:
        raise ConfigError(f"{key}={shown} goes on with '?' or '#', behind which signatures stand: {where}")


def url_child(url: str, name: str) -> str:
    """The URL of `name` below `url`."""
    return f"{url.rstrip('/')}/{name}"
