"""The documentation's pages: short, linked, complete."""

import re
from pathlib import Path

import pytest
import yaml

from scripts.docs.settings import group_pages
from tests.docs.pages import DOCS, EXIT_CODE, NOT_RUN, PAGES, ROOT, RUN, blocks_of

PARTS = ("start", "how-to", "reference", "explanation", "project")
MAX_WORDS = 1500
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def named(page: Path) -> str:
    return str(page.relative_to(DOCS))


def prose_of(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown makes them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


def test_every_page_is_in_one_of_the_five_parts() -> None:
    assert [named(page) for page in PAGES if page.parent == DOCS] == ["index.md"]
    assert {page.parent.name for page in PAGES if page.parent != DOCS} == set(PARTS)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_is_short_and_its_links_lead_somewhere(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) < MAX_WORDS
    dead = []
    for target, anchor in LINK.findall(prose_of(page)):
        found = (page.parent / target) if target else page
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors_of(found)):
            dead.append(f"{target}#{anchor}")
    assert dead == []


def test_every_page_is_in_the_sites_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = re.findall(r"[\w/-]+\.md", str(yaml.safe_load(text)["nav"]))
    assert sorted(page for page in pages if "/settings/" not in page) == [named(page) for page in PAGES]


@pytest.mark.parametrize("page", RUN, ids=named)
def test_every_note_to_the_checker_is_one_that_it_knows(page: Path) -> None:
    """A block that is not run says why, or names the test that runs it."""
    for block in blocks_of(page):
        found = NOT_RUN.fullmatch(block.note)
        assert not block.note or found or EXIT_CODE.fullmatch(block.note), f"line {block.line}: {block.note}"
        assert not (found and found[1]) or (ROOT / found[1]).exists(), f"line {block.line}: {block.note}"
    text = page.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(list(blocks_of(page))), "a fence that is no block"


def test_every_group_of_settings_has_a_page_in_the_site() -> None:
    pages = group_pages()
    groups = {
        path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name not in ("hydra", "__pycache__")
    }
    assert {Path(name).stem for name in pages} == groups | {"commands"}
    assert "| `offload.direct_io` | `true` | `true`, `false` |" in pages["reference/settings/offload.md"]
