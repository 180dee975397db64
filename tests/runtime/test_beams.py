"""A beam search in numbers: which ways go on, which have ended, and when no other can become better."""

from typing import NamedTuple

import pytest

from jobs.record.run_checkpoint import parse_search, serialize_search
from runtime.batching.balance import plan_blocks
from runtime.batching.prefixes import SharedPrefix
from runtime.cache.rectangle import row_moves
from runtime.requests.joining import add_hidden_beams, drop_orphaned_beams, join_requests, with_hidden_beams
from runtime.sequences.beams import NO_SCORE, BeamRules, BeamState, EarlyStopping, Hypothesis, advance_beams
from runtime.sequences.sequence import BeamTrace, FinishReason, Request, TokenLogprobs

SCORES = (-1.0, -2.0, -3.0, -4.0)  # of the candidates of two beams
ENDED = "ended"


class Step(NamedTuple):
    state: BeamState[str]
    kept: tuple[int, ...]

    @property
    def is_over(self) -> bool:
        return not self.kept


def step(
    *ranks: int,
    state: BeamState[str] | None = None,
    scores: tuple[float, ...] = SCORES,
    penalty: float = 1.0,
    stopping: EarlyStopping = False,
    num_new: int = 1,
) -> Step:
    """The step in which the candidates of these ranks end."""
    rules = BeamRules(num_beams=2, length_penalty=penalty, early_stopping=stopping, num_ends=1)
    ended = [ENDED + str(rank) if rank in ranks else None for rank in range(len(scores))]
    state = BeamState.initial(2) if state is None else state
    return Step(*advance_beams(rules, state, scores, ended, num_new=num_new, max_new=10))


def test_the_best_that_have_not_ended_go_on() -> None:
    assert step().kept == (0, 1)
    found = step(0)
    assert found.kept == (1, 2)
    assert found.state.scores == (-2.0, -3.0)
    assert found.state.hypotheses[0] == Hypothesis(score=-1.0, way="ended0")
    assert found.state.hypotheses[1].way is None


def test_only_the_first_candidates_may_end_as_completions() -> None:
    found = step(2, 3)
    assert found.kept == (0, 1)
    assert all(each.way is None for each in found.state.hypotheses)
    assert not found.is_over


@pytest.mark.parametrize(("penalty", "score"), [(0.0, -1.0), (1.0, -0.25), (2.0, -0.0625)])
def test_what_has_ended_is_compared_by_its_length(penalty: float, score: float) -> None:
    assert step(0, penalty=penalty, num_new=4).state.hypotheses[0].score == score


def both(worse: float = -1.1) -> BeamState[str]:
    hypotheses = (Hypothesis(score=-1.0, way="a"), Hypothesis(score=worse, way="b"))
    return BeamState(scores=(-1.0, -2.0), hypotheses=hypotheses)


def test_a_better_one_takes_the_place_of_the_worst() -> None:
    found = step(0, state=both(), scores=(-1.05, -2.0, -3.0, -4.0))
    assert [each.way for each in found.state.hypotheses] == ["a", "ended0"]
    found = step(0, state=both(), scores=(-1.5, -2.0, -3.0, -4.0))
    assert [each.way for each in found.state.hypotheses] == ["a", "b"]


@pytest.mark.parametrize(
    ("stopping", "penalty", "is_over"),
    [
        (False, 1.0, True),  # -2 for each of 2 tokens is worse than -0.9
        ("never", 1.0, False),  # -2 for each of 10 could be better
        ("never", -1.0, True),
        (True, 1.0, True),
    ],
)
def test_a_search_ends_when_no_beam_may_become_better(
    stopping: EarlyStopping, penalty: float, *, is_over: bool
) -> None:
    state = both(worse=-0.9 if penalty > 0 else -3.9)
    found = step(state=state, scores=(-2.0, -2.5, -3.0, -4.0), stopping=stopping, penalty=penalty, num_new=2)
    assert found.is_over == is_over


def test_early_stopping_ends_a_search_once_all_places_are_taken() -> None:
    scores = (-0.1, -0.2, -0.3, -0.4)
    assert not step(0, stopping=True, scores=scores).is_over
    assert step(0, 1, stopping=True, scores=scores).is_over
    assert not step(0, 1, stopping="never", scores=scores).is_over


def test_a_search_of_which_nothing_goes_on_is_over() -> None:
    assert step(0, 1, 2, 3).is_over


def test_candidates_are_so_many_that_beams_go_on_even_if_all_others_end() -> None:
    counts = [BeamRules(num_beams=3, num_ends=num_ends).num_candidates for num_ends in (0, 1, 2, 4)]
    assert counts == [6, 6, 9, 15]


def test_a_search_is_read_as_it_was_written() -> None:
    logprobs = (TokenLogprobs(own=-0.1, top_ids=(3, 4), top=(-0.1, -2.0)),)
    way = BeamTrace(token_ids=(3,), finish=FinishReason.stop, text_end=2, logprobs=logprobs)
    hypotheses = (Hypothesis(score=-0.1, way=way), Hypothesis[BeamTrace]())
    state = BeamState(scores=(-0.30000001192092896, NO_SCORE), hypotheses=hypotheses)
    assert parse_search(serialize_search(state)) == state
    assert parse_search(serialize_search(None)) is None


@pytest.mark.parametrize(
    "sources",
    [[0, 1, 2], [1, 0, 2], [1, 2, 0], [0, 0, 0], [2, 2, 1], [1, 0, 3, 2], [1, 0, 0, 5, 3, 4], [2, 3], [3, 0, 2, 1, 1]],
    ids=str,
)
def test_rows_move_in_place_to_where_they_belong(sources: list[int]) -> None:
    rows = [f"row {number}" for number in range(1 + max([*sources, len(sources) - 1]))]
    moved, aside = list(rows), ""
    num_moves = 0
    for new, old in row_moves(sources):
        value = aside if old is None else moved[old]
        num_moves += 1
        if new is None:
            aside = value
        else:
            moved[new] = value
    assert moved[: len(sources)] == [rows[source] for source in sources]
    assert num_moves <= sum(new != old for new, old in enumerate(sources)) * 3 // 2


def requests(num_asked: int, *ids: str) -> list[Request]:
    return [
        Request(id=id, prompt_ids=(1,), max_new_tokens=4, sample_index=index, num_beams=4)
        for id in ids
        for index in range(num_asked)
    ]


def test_each_prompt_has_all_of_its_beams_and_as_many_rows_as_are_asked_for() -> None:
    joined = list(add_hidden_beams(join_requests(requests(2, "a", "b"))))
    assert [each.request.key for each in joined] == [(id, index) for id in "ab" for index in range(4)]
    assert [list(each.members) for each in joined] == [[0], [1], [], [], [2], [3], [], []]
    beams = [each.request for each in joined]
    assert list(with_hidden_beams([4, 5, 0, 1], beams)) == [4, 5, 6, 7, 0, 1, 2, 3]
    assert drop_orphaned_beams([2, 3, 4, 5, 6, 7], beams) == [4, 5, 6, 7]


@pytest.mark.parametrize("size", [1, 4, 6, 8])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("shares", [True, False])
def test_beams_of_one_search_share_a_micro_batch(size: int, *, is_packed: bool, shares: bool) -> None:
    lengths = [length for length in (5, 30, 17, 2, 90) for _ in range(4)]
    prefixes = [prefix for length in lengths[::4] for prefix in [SharedPrefix(num_tokens=length)] * 4] if shares else ()
    blocks = plan_blocks(
        lengths, micro_batch_size=size, num_micro_batches=2, is_packed=is_packed, prefixes=prefixes, num_beams=4
    )
    lanes = [lane for block in blocks for lane in block.micro_batches]
    assert sorted(i for lane in lanes for i in lane) == [*range(20)]
    for lane in lanes:
        assert len(lane) <= max(4, size)
        assert all(list(lane[at : at + 4]) == [*range(lane[at], lane[at] + 4)] for at in range(0, len(lane), 4))
        assert all(lane[at] % 4 == 0 for at in range(0, len(lane), 4))
