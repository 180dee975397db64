"""A page as a browser would take it: its tags, its texts, and everything for which it would ask somebody."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser

LEADS_SOMEWHERE = {
    "src",
    "href",
    "srcset",
    "action",
    "formaction",
    "data",
    "poster",
    "background",
    "xlink:href",
    "ping",
}
LOADING = {"script", "link", "img", "iframe", "object", "embed", "base", "use", "image", "foreignobject", "form"}
VOID = {"meta", "br"}


class Parsed(HTMLParser):
    """The tags with their attributes, the texts, and whether every element is closed where it should be."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.styles: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.styles if self.open and self.open[-1] == "style" else self.texts).append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def outside(parsed: Parsed) -> Iterator[str]:
    """Everything for which a browser would ask somebody, or which would run."""
    for tag, attributes in parsed.tags:
        if tag in (
            "script",
            "link",
            "img",
            "iframe",
            "object",
            "embed",
            "base",
            "use",
            "image",
            "foreignobject",
            "form",
        ):
            yield f"<{tag}>"
        for name, value in attributes.items():
            text = value or ""
            if name.startswith("on") or (name in LEADS_SOMEWHERE and not text.startswith("#")):
                yield f"{tag} {name}={text}"
            if name == "style" and re.search(r"url|image|@|expression", text, re.I):
                yield f"{tag} style={text}"
            if name == "http-equiv" and text.lower() == "refresh":
                yield f"{tag} {name}={text}"
    for style in parsed.styles:
        yield from re.findall(r"url\(|@import|@font-face|image-set|expression\(|</", style, re.I)
