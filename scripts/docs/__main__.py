"""Collects the pages of the site in a directory, for `mkdocs build` (`make docs`).

python -m scripts.docs OUT
"""

import re
import shutil
import sys
from pathlib import Path

from .settings import group_pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
NOTE = re.compile(r"^<!-- .* -->\n", re.MULTILINE)  # notes for tests/docs


def site_page(text: str, path: Path, generated: set[str]) -> str:
    """The Markdown of the page at `path`, without notes for tests. Links to a folder of conf/ become links to its
    generated settings page; other links that leave docs/ become plain text."""

    def rewritten(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target:
            return match[0]
        linked = (path.parent / target).resolve()
        page = f"reference/settings/{linked.name}.md"
        if linked.parent == ROOT / "conf" and page in generated:
            up = "../" * len(path.relative_to(DOCS).parent.parts)
            return f"[{label}]({up}{page}{anchor})"
        return match[0] if linked.is_relative_to(DOCS) else label

    return LINK.sub(rewritten, NOTE.sub("", text))


def main(out: Path) -> None:
    """Replaces `out` with the site's pages."""
    shutil.rmtree(out, ignore_errors=True)
    generated = group_pages()
    written = {
        str(path.relative_to(DOCS)): site_page(path.read_text(encoding="utf-8"), path, set(generated))
        for path in DOCS.rglob("*.md")
    }
    for name, text in {**written, **generated}.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
