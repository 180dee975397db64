"""Every action prints as one line that parses back to it, and nothing else parses."""

import pytest

from runtime.plan.schedule.actions import Action, Op, parse_action

LINES = {
    "read 0": Action(Op.read, 0),
    "read 7#2": Action(Op.read, 7, page=2),
    "copy 12": Action(Op.copy, 12),
    "copy 12#0": Action(Op.copy, 12, page=0),
    "free 7": Action(Op.free, 7),
    "run 7.3": Action(Op.run, 7, 3),
    "pre 0.0": Action(Op.pre, 0, 0),
    "attend 7.3": Action(Op.attend, 7, 3),
    "post 7.3": Action(Op.post, 7, 3),
    "route 7.3": Action(Op.route, 7, 3),
    "experts 7": Action(Op.experts, 7),
    "end 7.3": Action(Op.end, 7, 3),
    "fetch 61.15": Action(Op.fetch, 61, 15),
    "store 7.3": Action(Op.store, 7, 3),
    "recv 7.3": Action(Op.recv, 7, 3),
    "send 9.3": Action(Op.send, 9, 3),
    "sync": Action(Op.sync, None),
}
NO_ACTIONS = [
    "", "read", "run 7", "read 7.3", "run 7.", "run .3", "run -1.0", "fly 7", "read seven", "free 1 2", "free 7#1",
    "run 7.3#1", "read 7#", "read #2", "experts 7.3", "sync 7", "store 7", "read  7", "READ 7", "read ٧",
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_an_action_prints_as_a_line_that_parses_back(line: str) -> None:
    assert str(LINES[line]) == line
    assert parse_action(line) == LINES[line]
    assert parse_action(f"  {line}\n") == LINES[line]


def test_the_table_holds_every_op() -> None:
    assert {action.op for action in LINES.values()} == set(Op)


@pytest.mark.parametrize("text", NO_ACTIONS)
def test_what_is_no_action_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="not an action") as error:
        parse_action(text)
    assert repr(text) in str(error.value)
