"""What a model thinks between two tags is told apart from its answer, wherever the first tag stands, and stop strings
count in the answer alone.
"""

import re
from collections.abc import Sequence

import pytest
import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from runtime import Completion, Runtime, SamplingConfig
from runtime.errors import ConfigError
from runtime.sequences.reasoning import Reasoning, SplitText, make_reasoning
from runtime.sequences.sampler import Sampler
from runtime.sequences.sequence import FinishReason, Request, resume_sequence
from runtime.sequences.sequence import Sequence as Running
from runtime.synthesize.tokenizer import byte_level_tokenizer
from tests.runtime.sampling_support import logits_for, step
from tests.tokenizer_kinds import llama2

VOCAB_SIZE = 512


@pytest.fixture(params=["in the text", "a token", "a special token"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    made = byte_level_tokenizer(VOCAB_SIZE - 2)
    if request.param != "in the text":
        made.add_tokens(["<think>", "</think>"], special_tokens=request.param == "a special token")
    return made


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The tags as one token each, where the tokenizer has them."""
    tags = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
    parts = re.split("(</?think>)", text)
    each = [[tags[part]] if part in tags else tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
    return [token for ids in each for token in ids]


def fed(
    tokenizer: PreTrainedTokenizerFast, text: str, *, prompt: str = "Hi", stop: Sequence[str] = (), known: int = 0
) -> tuple[Running, SplitText]:
    """A sequence that was given the tokens of a text, and what it comes to. `known`: tokens of an earlier process."""
    sampler = Sampler(SamplingConfig(reasoning="auto"), vocab_size=VOCAB_SIZE, tokenizer=tokenizer)
    sampler.reasoning = Reasoning(tokenizer, "<think>", "</think>")
    request = Request(id="0", prompt_ids=tuple(ids_of(tokenizer, prompt)), max_new_tokens=1000, stop=tuple(stop))
    ids = ids_of(tokenizer, text)
    row = Running(request=request, generated=ids[:known])
    for token in ids[known:]:
        if row.finish is None:
            step(sampler, [row], logits_for(token, size=VOCAB_SIZE), 0)
    return row, sampler.reasoning.split(row)


@pytest.mark.parametrize(
    ("prompt", "completion", "reasoning", "text"),
    [
        ("Hi", "<think>\nhm, — 3?\n</think>\n\nIt is Ö.", "hm, — 3?", "It is Ö."),
        ("Hi", " \n<think>a</think>b < c", "a", "b < c"),
        ("Hi<think>\n", "hm\n</think>It is.", "hm", "It is."),
        ("Hi<think>", "<think>hm</think>It is.", "hm", "It is."),
        ("Hi", "hm</think> It is.", "hm", "It is."),
        ("Hi", "<think></think>It is.", "", "It is."),
        ("Hi", "<think>no end", "no end", ""),
        ("Hi<think>", "no end", "no end", ""),
        ("Hi<think>", "", "", ""),
        ("Hi", "no thought, a < b", None, "no thought, a < b"),
        ("Hi", "", None, ""),
        ("<think>no</think>", "It is.", None, "It is."),
    ],
)
def test_both_parts_are_told_apart(
    prompt: str, completion: str, reasoning: str | None, text: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    for known in (0, len(ids_of(tokenizer, completion)) // 2):
        _, parts = fed(tokenizer, completion, prompt=prompt, known=known)
        assert parts == SplitText(reasoning=reasoning, text=text)


@pytest.mark.parametrize(
    ("prompt", "completion", "reasoning", "text"),
    [
        ("Hi", "<think>one\n\ntwo</think>three\n\nfour", "one\n\ntwo", "three"),
        ("Hi<think>", "one\n\ntwo</think>three\n\nfour", "one\n\ntwo", "three"),
        ("Hi", "<three\n\nfour</think>five", None, "<three"),
        ("Hi", "three\n\nfour", None, "three"),
        ("Hi", "\n\nfour", None, ""),
    ],
)
def test_stop_strings_count_behind_the_reasoning_alone(
    prompt: str, completion: str, reasoning: str | None, text: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    for known in (0, 5):
        if known and not completion.startswith(("<think>", "one")):
            continue
        row, parts = fed(tokenizer, completion, prompt=prompt, stop=["\n\n"], known=known)
        assert parts == SplitText(reasoning=reasoning, text=text)
        assert row.finish is FinishReason.stop


@pytest.mark.parametrize("known", range(4))
def test_a_row_that_goes_on_stops_where_it_would_have_stopped(known: int, tokenizer: PreTrainedTokenizerFast) -> None:
    """Also where what an earlier process left could have been the beginning of a thought, with a stop string in it."""
    whole, parts = fed(tokenizer, "<thread>", stop=["<t"])
    assert (parts.text, whole.finish) == ("", FinishReason.stop)
    sampler = Sampler(SamplingConfig(reasoning="auto"), vocab_size=VOCAB_SIZE, tokenizer=tokenizer)
    sampler.reasoning = Reasoning(tokenizer, "<think>", "</think>")
    left = Running(request=whole.request, generated=whole.generated[:known]).snapshot()
    row = resume_sequence(whole.request, left, torch.device("cpu"))
    for token in ids_of(tokenizer, "<thread>")[known:]:
        if row.finish is None:
            step(sampler, [row], logits_for(token, size=VOCAB_SIZE), 0)
    assert (row.generated, row.finish, row.text_end) == (whole.generated, whole.finish, whole.text_end)


def test_an_answer_keeps_its_spaces_with_a_tokenizer_that_strips_the_first() -> None:
    tokenizer = llama2()
    tokenizer.add_tokens([AddedToken(">It", normalized=False)])
    thinking, prompt = Reasoning(tokenizer, "<think>", "</think>"), tokenizer("The answer")["input_ids"]
    names = ["<", "b", ">", "▁yes", "<", "/", "t", "h", "i", "n", "k", ">It", "▁is", "▁yes"]
    ids = list(map(tokenizer.get_vocab().__getitem__, names))
    request = Request(id="0", prompt_ids=tuple(prompt), max_new_tokens=99)
    assert thinking.split(Running(request=request, generated=ids)).text == "It is yes"
    assert thinking.split(Running(request=request, generated=ids[-1:])) == SplitText(reasoning=None, text=" yes")


def test_a_tag_that_is_spelled_counts_too_where_there_is_a_token_of_it(tokenizer: PreTrainedTokenizerFast) -> None:
    thinking = Reasoning(tokenizer, "<think>", "</think>")
    spelled = tokenizer("<think>a</think>b", add_special_tokens=False)["input_ids"]
    row = Running(request=Request(id="0", prompt_ids=(1,), max_new_tokens=1), generated=spelled)
    assert thinking.split(row) == SplitText(reasoning="a", text="b")


def test_auto_takes_the_tags_that_the_tokenizer_or_its_template_knows(caplog: pytest.LogCaptureFixture) -> None:
    auto, tokenizer = SamplingConfig(reasoning="auto"), byte_level_tokenizer(VOCAB_SIZE)
    assert make_reasoning(auto, tokenizer) is None
    assert "the tokenizer and its chat template have none of" in caplog.text
    tokenizer.chat_template = "{{ '[THINK]' }}{{ x.split('[/THINK]') }}"
    found = make_reasoning(auto, tokenizer)
    assert found is not None
    row = Running(request=Request(id="0", prompt_ids=(1,), max_new_tokens=1), generated=ids_of(tokenizer, "a[/THINK]b"))
    assert found.split(row) == SplitText(reasoning="a", text="b")
    assert make_reasoning(SamplingConfig(), tokenizer) is None
    with pytest.raises(ConfigError, match=r"sampling\.reasoning needs a tokenizer"):
        make_reasoning(auto, None)


@pytest.mark.parametrize("reasoning", ["think", ["<think>"], ["a", "b", "c"], ["", "b"]], ids=str)
def test_what_are_no_tags_is_refused(reasoning: str | list[str]) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.reasoning must be auto, two tags"):
        SamplingConfig(reasoning=reasoning)


def test_a_completion_says_both_and_without_the_setting_all_is_text() -> None:
    settings = {"model": "random", "max_new_tokens": 12, "ignore_eos": True}
    (plain,) = Runtime(**settings).generate(["Think: <think>"])  # pyright: ignore[reportArgumentType]
    (split,) = Runtime(**settings, reasoning=["<think>", "</think>"]).generate(["Think: <think>"])  # pyright: ignore
    assert isinstance(split, Completion)
    assert (plain.reasoning, split.text) == (None, "")
    assert split.reasoning == plain.text.strip() != ""
    assert split.token_ids == plain.token_ids
