"""Documents are cut, and texts counted, as lm-evaluation-harness does both."""

import pytest

from runtime.requests.scoring import TextSize, rolling_windows

lm_eval_utils = pytest.importorskip("lm_eval.utils", reason="the extra `eval` is not installed")
START = 9999


@pytest.mark.parametrize("room", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("num_tokens", [1, 2, 6, 7, 8, 9, 15, 16, 17, 40])
def test_windows_are_those_of_the_harness(num_tokens: int, room: int) -> None:
    tokens = list(range(num_tokens))
    theirs = lm_eval_utils.get_rolling_token_windows(
        token_list=tokens, prefix_token=START, max_seq_len=room, context_len=1
    )
    expected = [lm_eval_utils.make_disjoint_window(window) for window in theirs]
    found = [(list(prompt), list(target)) for prompt, target in rolling_windows(tokens, START, room)]
    assert found == expected
    assert [token for _, target in found for token in target] == tokens


@pytest.mark.parametrize("text", ["one", "two words", " in front and behind \n", "a\t\tb\n\nc", "déjà vu", " "])
def test_words_and_bytes_are_counted_as_by_the_harness(text: str) -> None:
    from lm_eval.api.task import ConfigurableTask

    size = TextSize.from_text(text)
    assert (size.num_words, size.num_bytes) == (ConfigurableTask.count_words(text), ConfigurableTask.count_bytes(text))
