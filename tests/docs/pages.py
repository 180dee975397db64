"""The pages of the documentation, and the fenced blocks of a page."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
RUN = [page for page in PAGES if page.parent.name in ("start", "how-to")]  # every command of these is run
FENCE = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?(?P<indent> *)```(?P<language>\w+)(?P<info>[^\n]*)\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
TITLE = re.compile(r'title="([^"]+)"')
NOT_RUN = re.compile(r"not run: \S.*|run by (tests/[\w/]+\.py)")
EXIT_CODE = re.compile(r"exit code (\d+)")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. `note`: the comment on the line above, for the checker; `title`: the file that it shows."""

    language: str
    text: str
    note: str
    title: str | None
    line: int

    @property
    def is_run(self) -> bool:
        return self.language in ("bash", "python") and not NOT_RUN.fullmatch(self.note) and self.title is None

    @property
    def exit_code(self) -> int:
        match = EXIT_CODE.fullmatch(self.note)
        return int(match[1]) if match else 0


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        title = TITLE.search(match["info"])
        lines = match["text"].splitlines(keepends=True)
        yield Block(
            language=match["language"],
            text="".join(line.removeprefix(match["indent"]) for line in lines),
            note=match["note"] or "",
            title=title[1] if title else None,
            line=text.count("\n", 0, match.start()) + 1,
        )
