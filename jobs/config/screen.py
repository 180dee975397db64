"""Text for a terminal: lines that are too long are folded between words."""

import re
import shutil
import sys
from textwrap import wrap

MAX_WIDTH, MIN_WIDTH = 120, 60
COMMAND = "weightstream "
FULL_WIDTH = 100  # a line of prose that is longer goes on in the next one
COLUMN_GAP = re.compile(r"(?<=\S) {2,}(?:<?= )?(?=\S)")


def screen_width() -> int:
    """The width of stdout's terminal, within limits; 120 if stdout is no terminal."""
    if not sys.stdout.isatty():
        return MAX_WIDTH
    return max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns))


def fold_for_screen(text: str) -> str:
    """Folds lines that are longer than stdout's terminal is wide. Text for files and pipes stays as it is."""
    return fold(text, screen_width()) if sys.stdout.isatty() else text


def fold(text: str, width: int) -> str:
    """Folds lines of more than `width` characters. The rest goes below the text of a line's last column, if that begins
    in the left half. Paragraphs of full lines without indentation are filled anew."""
    lines, is_full = list[str](), False
    for line in text.split("\n"):
        is_prose = line[:1].strip() != "" and COLUMN_GAP.search(line) is None
        if is_full and is_prose and width < MAX_WIDTH:
            lines[-1] += f" {line}"
        else:
            lines.append(line)
        is_full = is_prose and len(line) > FULL_WIDTH
    return "\n".join(line if len(line) <= width else _fold_line(line, width) for line in lines)


def _fold_line(line: str, width: int) -> str:
    lead = len(line) - len(line.lstrip())
    gaps = [match.span() for match in COLUMN_GAP.finditer(line)]
    left = [end for _, end in gaps if end <= width // 2]
    if line[lead:].startswith(COMMAND):  # stays whole, to be copied; what it is for goes below
        begin, end = gaps[-1] if gaps else (len(line), len(line))
        below = _fill(line[end:], width, lead + 4) if end < len(line) else ""
        return f"{line[:begin]}\n{below}".rstrip("\n")
    if gaps and not left:
        begin, end = gaps[0]
        return f"{_fill(line[lead:begin], width, lead)}\n{_fill(line[end:], width, lead + 4)}"
    indent = left[-1] if left else lead + 4 * bool(lead)
    head = line[: left[-1]] if left else line[:lead]
    return _fill(line[len(head) :], width, indent, head)


def _fill(text: str, width: int, indent: int, head: str | None = None) -> str:
    spaces = " " * indent
    first = spaces if head is None else head
    lines = wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=spaces,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)
