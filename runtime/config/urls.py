"""URLs as settings: which texts are some, and which are refused because they would give a secret away."""

import re
from typing import TypeGuard
from urllib.parse import urlsplit

from ..errors import ConfigError

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
