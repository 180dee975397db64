"""Log-probabilities in OpenAI's forms: tokens keep their spaces and bytes, each has an entry of its own, and offsets
are those of the completion's text.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from jobs.exporting.openai_batch import MIN_LOGPROB, LogprobFormatter
from runtime.config.settings import ModelConfig
from runtime.sequences.detokenizer import Detokenizer
from runtime.sequences.sequence import Request
from tests.runtime.test_detokenizer import random_pairs
from tests.tokenizer_kinds import EVEN, tokenizer_of


def tokens_of(kind: str) -> LogprobFormatter:
    """With a tokenizer that is there already."""
    tokens = LogprobFormatter(model=ModelConfig(name="test", path="."), cache_dir=None)
    vars(tokens)["_detokenizer"] = Detokenizer(tokenizer_of(kind))
    return tokens


def row_of(kind: str, prompt: str, text: str) -> Mapping[str, Any]:
    """A row whose tokens are the likeliest in their places."""
    tokenizer = tokenizer_of(kind)
    before, both = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (prompt, prompt + text))
    ids = both[len(before) :]
    own = [-0.5 - place for place in range(len(ids))]
    request = Request(id="0", prompt_ids=tuple(before), max_new_tokens=9)
    return {
        "token_ids": ids, "completion": Detokenizer(tokenizer).completion_text(request, ids), "logprobs": own,
        "top_token_ids": [[id] for id in ids], "top_logprobs": [[value] for value in own],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["llama2", "gemma", "gguf_llama", "mixtral", "byte_level"])
def test_tokens_keep_their_spaces_in_both_forms(kind: str) -> None:
    row = row_of(kind, "The", " answer is yes")
    assert row["completion"] == " answer is yes"
    told = tokens_of(kind).completion_logprobs(row, 1)
    assert "".join(told["tokens"]) == " answer is yes"
    assert told["tokens"][0][0] == " "
    assert told["text_offset"] == [sum(map(len, told["tokens"][:place])) for place in range(len(told["tokens"]))]
    assert told["top_logprobs"] == [{text: value} for text, value in zip(told["tokens"], row["logprobs"], strict=True)]
    chat = tokens_of(kind).chat_logprobs(row, 1)["content"]
    assert [each["token"] for each in chat] == told["tokens"]
    assert b"".join(bytes(each["bytes"]) for each in chat) == b" answer is yes"
    assert all(each["top_logprobs"] == [{key: each[key] for key in ("token", "bytes", "logprob")}] for each in chat)


def test_a_word_with_and_without_its_space_are_two_entries() -> None:
    """As with Mixtral's `▁true` and `true`, of which the less likely one had the only entry."""
    names = tokenizer_of("llama2").get_vocab()
    word = next(name[1:] for name in names if name[0] == "▁" and name[1:] in names)
    with_space, without = names[f"▁{word}"], names[word]
    row = {
        "token_ids": [with_space], "completion": f" {word}",
        "logprobs": [-0.3], "top_token_ids": [[with_space, without]], "top_logprobs": [[-0.3, -1.4]],
    }  # fmt: skip
    told = tokens_of("llama2").completion_logprobs(row, 2)
    assert told["tokens"] == [row["completion"]]
    assert told["top_logprobs"] == [{f" {word}": -0.3, word: -1.4}]


@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_tokens_of_one_text_never_overwrite_each_other(chosen: int) -> None:
    """Of an ordinary token and a byte token of one text the chosen one has it, and the other its id."""
    names = tokenizer_of("llama2").get_vocab()
    letter, byte, other = names["a"], names["<0x61>"], names["▁"]
    ids, values = [letter, byte, other], [-0.1, -0.2, -3.0]
    row = {
        "token_ids": [ids[chosen]], "completion": "", "logprobs": [values[chosen]],
        "top_token_ids": [ids], "top_logprobs": [values],
    }  # fmt: skip
    (top,) = tokens_of("llama2").completion_logprobs(row, 3)["top_logprobs"]
    second = letter if chosen == 1 else byte
    assert sorted(top.values()) == sorted(values)
    assert top["a"] == values[chosen if chosen < 2 else 0]
    assert top[f"token_id:{second}"] == values[0 if chosen == 1 else 1]


def test_the_text_of_a_chosen_token_that_is_not_among_the_likeliest_is_no_other_tokens() -> None:
    names = tokenizer_of("llama2").get_vocab()
    letter, byte = names["a"], names["<0x61>"]
    row = {
        "token_ids": [byte], "completion": "a", "logprobs": [-9.0],
        "top_token_ids": [[letter]], "top_logprobs": [[-0.1]],
    }  # fmt: skip
    told = tokens_of("llama2").completion_logprobs(row, 1)
    assert (told["tokens"], told["token_logprobs"]) == (["a"], [-9.0])
    assert told["top_logprobs"] == [{f"token_id:{letter}": -0.1}]


@pytest.mark.parametrize(
    ("kind", "names"), [("llama2", ("<0xE2>", "<0x82>", "<0xAC>")), ("byte_level", ("â", "Ĥ", "¬"))]
)
def test_parts_of_a_character_have_their_bytes_and_stand_where_it_begins(kind: str, names: tuple[str, ...]) -> None:
    vocab = tokenizer_of(kind).get_vocab()
    ids = [*(vocab[name] for name in names), vocab["a"], 2]
    row = {
        "token_ids": ids, "completion": "€a", "logprobs": [-1.0, -1.0, -1.0, -1.0, -float("inf")],
        "top_token_ids": [ids[:3]] * 5, "top_logprobs": [[-1.0, -2.0, -3.0]] * 5,
    }  # fmt: skip
    told = tokens_of(kind).completion_logprobs(row, 3)
    assert told["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "a", "</s>"]
    assert told["text_offset"] == [0, 0, 0, 1, 2]
    assert told["top_logprobs"][0] == {"bytes:\\xe2": -1.0, "bytes:\\x82": -2.0, "bytes:\\xac": -3.0}
    assert told["token_logprobs"][4] == MIN_LOGPROB
    chat = tokens_of(kind).chat_logprobs(row, 0)["content"]
    assert [each["bytes"] for each in chat[:4]] == [[0xE2], [0x82], [0xAC], [0x61]]


def test_where_a_text_begins_with_the_completion_its_first_token_has_no_space_that_the_text_lacks() -> None:
    tokenizer = tokenizer_of("t5")
    ids = tokenizer("it is", add_special_tokens=False)["input_ids"]
    row = {
        "token_ids": ids, "completion": tokenizer.decode(ids), "logprobs": [-1.0] * len(ids),
        "top_token_ids": [[]] * len(ids), "top_logprobs": [[]] * len(ids),
    }  # fmt: skip
    told = tokens_of("t5").completion_logprobs(row, 0)
    assert "".join(told["tokens"]) == row["completion"] == "it is"
    assert told["text_offset"][0] == 0


@pytest.mark.dealt(most=4)
@pytest.mark.parametrize("kind", EVEN)
def test_values_of_random_tokens_are_all_there_and_offsets_are_those_of_the_completion(kind: str) -> None:
    tokens, texts, num_found = tokens_of(kind), Detokenizer(tokenizer_of(kind)), 0
    for prompt, ids in random_pairs(kind)[:200]:
        completion = texts.completion_text(Request(id="0", prompt_ids=tuple(prompt), max_new_tokens=99), ids)
        tops = [list(dict.fromkeys([id, *ids, *prompt]))[:20] for id in ids]
        row = {
            "token_ids": ids, "completion": completion, "logprobs": [-1.0] * len(ids), "top_token_ids": tops,
            "top_logprobs": [[-1.0 - rank for rank in range(len(top))] for top in tops],
        }  # fmt: skip
        told = json.loads(json.dumps(tokens.completion_logprobs(row, 20)))
        assert [list(top.values()) for top in told["top_logprobs"]] == row["top_logprobs"]
        assert all(top[text] == -1.0 for top, text in zip(told["top_logprobs"], told["tokens"], strict=True))
        if not texts.has_text(prompt[-1]) or not texts.spelling(prompt[-1]).is_whole:
            continue  # the completion may begin with a part of a character
        for id, text, offset in zip(ids, told["tokens"], told["text_offset"], strict=True):
            if texts.has_text(id) and texts.spelling(id).is_whole:
                assert completion[offset : offset + len(text)] == text, (prompt, ids)
                num_found += 1
    assert num_found > 300
