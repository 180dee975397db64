"""Work in processes of its own: what ends there spoils no other."""

import os
import time

from tests.isolated import Ended, each_isolated


def end_or_answer(task: str) -> str:
    if task == "end":
        os._exit(3)
    if task == "hang":
        time.sleep(60)
    return task.upper()


def test_a_process_that_ends_is_an_answer_and_others_go_on() -> None:
    answers = dict(each_isolated(end_or_answer, ["a", "end", "b"], num_processes=1, limit_seconds=60))
    assert answers == {"a": "A", "end": Ended(why="its process ended with exit code 3"), "b": "B"}


def test_a_process_that_hangs_is_ended() -> None:
    assert list(each_isolated(end_or_answer, ["hang"], num_processes=1, limit_seconds=0.1)) == [
        ("hang", Ended(why="within 0 s (seconds=...)", is_late=True))
    ]
