"""Config fields that can be set to strings, as on the command line: `tier="nvme"` for `tier=Tier.nvme`,
`model="/data/llama"` for `model=ModelConfig(path="/data/llama")`. Also hints for misspelled words, and checks that URLs
contain no secrets."""

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
    """A descriptor for a dataclass field of type T that may also be set to a string. `read(key, text)` converts the
    string, or raises ConfigError with the key, such as `offload.tier`. Other values must be instances of `kinds`."""

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
            raise ConfigError(f"{self._key} must be a string or {kinds}, got {value!r}")
        vars(instance)[self._name] = value


def enum_field(default: Enum) -> Any:
    """Makes a field for a member of the default's enum. This function and the next two return Any, so that type
    checkers accept the result as the field's default."""
    kind = type(default)
    return TextField(default, (kind,), lambda key, text: parse_enum(kind, key, text))


def optional_enum_field(kind: type[E]) -> Any:
    """Makes a field for a member of `kind` or None, the default."""
    return TextField[E | None](None, (kind, type(None)), lambda key, text: parse_enum(kind, key, text))


def group_field(default: T, read: Callable[[str], T]) -> Any:
    """Makes a field for a config dataclass of the default's type."""
    return TextField(default, (type(default),), lambda _, text: read(text))


def parse_enum(kind: type[E], key: str, text: str) -> E:
    """Returns the member with that name. Raises ConfigError with the key, all members and the closest one."""
    if text not in kind.__members__:
        names, near = ", ".join(kind.__members__), did_you_mean(text, kind.__members__)
        raise ConfigError(f"{key} must be one of {names}, got {text!r}{near}")
    return kind[text]


def closest_match(word: str, known: Collection[str]) -> str | None:
    """Returns the most similar word of `known`, ignoring case; None if none is similar."""
    by_folded = {candidate.casefold(): candidate for candidate in reversed([*known])}
    near = get_close_matches(word.casefold(), by_folded, n=1)
    return by_folded[near[0]] if near else None


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Returns a hint to append to an error message; "" if no known word is similar."""
    near = closest_match(word, known)
    return f": did you mean {near}?" if near is not None else ""


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:::|://)")


def is_url(text: str | None) -> TypeGuard[str]:
    """True if `text` has a URL scheme, such as `s3://bucket/name`; otherwise it is a path."""
    return text is not None and _SCHEME.match(text) is not None


def require_plain_url(text: str | None, key: str) -> None:
    """Raises ConfigError for a URL with credentials or a signature, which would appear in logs and files of the run,
    and for chained schemes. The message does not contain the secret. Does nothing if `text` is not a URL."""
    if text is None or not is_url(text):
        return
    if "::" in text:
        raise ConfigError(f"{key}: chained URLs ('::') are not supported; use a single scheme, as in s3://bucket/name")
    parts = urlsplit(text)
    url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    advice = "set credentials in the environment, or in the configuration files of the store's own tools"
    if "@" in parts.netloc and parts.scheme != "hf":
        raise ConfigError(f"{key}={url} contains credentials, which logs and the run directory would keep: {advice}")
    if parts.query or parts.fragment:
        raise ConfigError(f"{key}={url} has a query or fragment ('?' or '#'), which may hold a signature: {advice}")


def url_child(url: str, name: str) -> str:
    """Returns the URL of `name` below `url`."""
    return f"{url.rstrip('/')}/{name}"
