"""Help and plans on a terminal of 80 columns are folded between words, and are unchanged in a pipe."""

import os
import shutil
import sys

import pytest

from jobs.config.screen import fold, fold_for_screen, screen_width


def test_the_rest_of_a_line_goes_below_its_last_column_in_the_left_half() -> None:
    assert fold("  plan    predicts the memory use and time of a run", 40) == (
        "  plan    predicts the memory use and\n          time of a run"
    )
    assert fold("  weights  3 GiB  = 118 tokens x 634,368 x 2 B + more", 44) == (
        "  weights  3 GiB  = 118 tokens x 634,368 x 2\n                    B + more"
    )


def test_without_columns_it_is_indented_and_words_stay_whole() -> None:
    assert fold("  a: one two three", 12) == "  a: one two\n      three"
    assert fold("see " + "x" * 30, 12) == "see\n" + "x" * 30
    assert fold("short\n\nlines", 12) == "short\n\nlines"


def test_a_command_stays_whole_and_is_explained_below() -> None:
    command = "  weightstream generate sampling=sample sampling.n=4 run=four"
    assert fold(f"{command}    four of each", 40) == f"{command}\n      four of each"
    assert fold(command, 40) == command


def test_a_column_in_the_right_half_goes_below() -> None:
    assert fold("  outputs/generate/summary.json    the plan", 40) == "  outputs/generate/summary.json\n      the plan"


def test_a_paragraph_is_filled_anew() -> None:
    paragraph = fold("word " * 50, 110)
    assert fold(f"{paragraph}\n\nnext", 80) == fold("word " * 50, 80) + "\n\nnext"
    assert fold("one\ntwo", 80) == "one\ntwo"


def test_only_a_terminal_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "word " * 30
    assert (screen_width(), fold_for_screen(line)) == (120, line)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns, width in ((80, 80), (300, 120), (20, 60)):
        monkeypatch.setattr(shutil, "get_terminal_size", lambda _, columns=columns: os.terminal_size((columns, 24)))
        assert screen_width() == width
    monkeypatch.setattr(shutil, "get_terminal_size", lambda _: os.terminal_size((80, 24)))
    assert max(map(len, fold_for_screen(line).splitlines())) <= 80
