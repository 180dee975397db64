"""HTML that cannot be broken by what stands in it: text is escaped where it enters, and only what was made here is not.

A run's rows are anybody's text, so no page is put together of strings.
"""

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

VOID = frozenset({"meta", "br"})


class Html(str):
    """Markup that was made by `element`, or is a constant of ours."""

    __slots__ = ()


Child: TypeAlias = "str | Html | Iterable[Child] | None"


def element(tag: str, /, *children: Child, **attributes: str | float | None) -> Html:
    """An element; text among its children is escaped, None left out. A trailing `_` of an attribute's name is dropped,
    other `_` become `-`; an attribute that is None is left out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    text = "".join(f' {key}="{escape(str(value), quote=True)}"' for key, value in given.items())
    if tag in VOID:
        return Html(f"<{tag}{text}>")
    return Html(f"<{tag}{text}>{joined(children)}</{tag}>")


def joined(children: Iterable[Child]) -> Html:
    return Html("".join(map(_text, children)))


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, str):
        return child if isinstance(child, Html) else escape(_visible(child), quote=False)
    return joined(child)


def _visible(text: str) -> str:
    """Control characters as their escapes: browsers drop some, and the marks that turn the direction of a line around
    would make it say something else than it does."""
    return "".join(char if char.isprintable() or char in "\n\t " else ascii(char)[1:-1] for char in text)


def table(head: Iterable[Child], rows: Iterable[Iterable[Child]], class_: str | None = None) -> Html:
    """A table in a box that scrolls by itself where the screen is narrow."""
    top = element("thead", element("tr", [element("th", cell, scope="col") for cell in head]))
    body = element("tbody", [element("tr", [element("td", cell) for cell in row]) for row in rows])
    return element("div", element("table", top, body, class_=class_), class_="scrolls")
