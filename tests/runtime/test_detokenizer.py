"""The text of a completion is that of prompt and completion together, less that of the prompt: with tokenizers of every
kind, over random tokens and over cut texts.
"""

import random
from functools import cache
from pathlib import Path

import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from runtime import Rejected, Runtime
from runtime.sequences.detokenizer import Detokenizer
from runtime.sequences.sequence import Request
from tests.support import synthesize
from tests.tokenizer_kinds import EVEN, KINDS, TEXT, tokenizer_of

NUM_PAIRS = 1000
STRIPPING = ("llama2", "mistral_without_prefix", "t5", "gguf_llama", "mixtral")  # the first space of a text


def request_of(*prompt: int, grammar: str | None = None) -> Request:
    return Request(id="0", prompt_ids=prompt, max_new_tokens=1000, grammar=grammar)


def decoded(tokenizer: PreTrainedTokenizerBase, *ids: int) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def common(before: str, both: str) -> str:
    """The longest text that both begin with."""
    return next(before[:end] for end in range(len(before), -1, -1) if both.startswith(before[:end]))


def id_of(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    found = tokenizer.get_vocab()[token]
    assert isinstance(found, int)
    return found


@cache
def random_pairs(kind: str) -> list[tuple[list[int], list[int]]]:
    """Prompts and completions: a text cut anywhere, also within a character, and any tokens at all, special ones and
    numbers that no token has among them."""
    tokenizer, choose = tokenizer_of(kind), random.Random(kind)
    ids = tokenizer(TEXT * 3, add_special_tokens=False)["input_ids"]
    pairs = []
    for number in range(NUM_PAIRS):
        num_prompt, num_new = choose.randint(1, 40), choose.randint(0, 20)
        if number % 2:
            begin = choose.randrange(len(ids) - num_prompt - num_new)
            known = ids[begin : begin + num_prompt + num_new]
        else:
            known = choose.choices(range(len(tokenizer) + 3), k=num_prompt + num_new)
        pairs.append((known[:num_prompt], known[num_prompt:]))
    return pairs


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_completion_are_the_text_of_both(kind: str) -> None:
    """Where the text of both does not begin with the prompt's, as a character is cut, no text is lost."""
    tokenizer, num_whole = tokenizer_of(kind), 0
    texts = Detokenizer(tokenizer)
    for prompt, new in random_pairs(kind):
        before, both = decoded(tokenizer, *prompt), decoded(tokenizer, *prompt, *new)
        completion = texts.completion_text(request_of(*prompt), new)
        assert common(before, both) + completion == both, (prompt, new)
        num_whole += before + completion == both
    assert num_whole > 0.6 * NUM_PAIRS


def spaced_word(kind: str) -> tuple[int, str]:
    """A token that begins with a space, and its letters."""
    words = {name: id for name, id in tokenizer_of(kind).get_vocab().items() if name[0] == "▁" and name[1:].isalpha()}
    name = min(words, key=len)
    return words[name], name[1:]


@pytest.mark.parametrize("kind", STRIPPING)
def test_a_completion_keeps_its_first_space(kind: str) -> None:
    tokenizer, (token, word) = tokenizer_of(kind), spaced_word(kind)
    prompt = tokenizer("The answer", add_special_tokens=False)["input_ids"]
    assert Detokenizer(tokenizer).completion_text(request_of(*prompt), [token]) == f" {word}"
    assert decoded(tokenizer, token) == word, "alone it is another text"


@pytest.mark.parametrize("kind", STRIPPING)
def test_where_nothing_stands_before_it_a_completion_is_a_text_unless_it_follows_a_grammar(kind: str) -> None:
    texts, (token, word) = Detokenizer(tokenizer_of(kind)), spaced_word(kind)
    assert texts.completion_text(request_of(1), [token]) == word
    assert texts.completion_text(request_of(1, grammar="..."), [token]) == f" {word}"


def test_behind_an_encoder_only_the_decoders_own_start_is_the_prompt() -> None:
    tokenizer = tokenizer_of("t5")
    prompt = tokenizer("The answer", add_special_tokens=False)["input_ids"]
    new = tokenizer("it is", add_special_tokens=False)["input_ids"]
    texts = Detokenizer(tokenizer, start_token_id=0)
    assert texts.completion_text(request_of(*prompt), new) == decoded(tokenizer, *new) == "it is"
    assert texts.completion_text(request_of(*prompt), new, begin=1) == "it is"[len(decoded(tokenizer, new[0])) :]


def test_a_run_behind_an_encoder_gives_the_text_that_the_decoder_begins(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("t5")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    synthesize("t5", tmp_path / "model")
    words = [id for name, id in tokenizer.get_vocab().items() if name[0] == "▁" and name[1:].isalpha()]
    runtime = Runtime(
        model=str(tmp_path / "model"),
        tokenizer=str(tmp_path / "tokenizer"),
        max_new_tokens=4,
        sequence_bias=[[[word], 99.0] for word in words],
    )
    for result in runtime.generate(["The answer is", "yes and no"]):
        assert not isinstance(result, Rejected)
        assert result.token_ids[0] in words
        assert result.text == decoded(tokenizer, *result.token_ids)


def test_a_character_that_the_prompt_begins_is_the_completions() -> None:
    tokenizer = tokenizer_of("bytes_and_syllables")
    ids = tokenizer("50 €.", add_special_tokens=False)["input_ids"]
    texts = Detokenizer(tokenizer)
    assert [texts.completion_text(request_of(*ids[:cut]), ids[cut:]) for cut in (3, 4, 5, 6)] == ["€.", "€.", "€.", "."]


@pytest.mark.parametrize("kind", ["llama2", "gemma", "bytes_and_syllables"])
def test_a_long_run_of_byte_tokens_before_it_is_not_cut(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    texts = Detokenizer(tokenizer)
    ids = tokenizer("a" + "鼠牛虎兔" * 20, add_special_tokens=False)["input_ids"]
    assert len(ids) > 200
    for cut in range(len(ids) - 12, len(ids)):
        before, both = decoded(tokenizer, *ids[:cut]), decoded(tokenizer, *ids)
        assert texts.completion_text(request_of(*ids[:cut]), ids[cut:]) == both[len(common(before, both)) :]


@pytest.mark.dealt(most=8)
@pytest.mark.parametrize("kind", EVEN)
@pytest.mark.parametrize("begins_text", [False, True])
def test_texts_and_offsets_of_tokens_add_up_to_the_text(kind: str, begins_text: bool) -> None:
    """What a token adds stands at its offset, and offsets are those of the text of all; a token with a part of a
    character stands where the character begins."""
    tokenizer, num_found = tokenizer_of(kind), 0
    texts = Detokenizer(tokenizer)
    for prompt, new in random_pairs(kind)[:200]:
        before = [] if begins_text else [*prompt, *tokenizer("a b", add_special_tokens=False)["input_ids"]]
        text = texts.added_text([*before, *new], len(before))
        offsets, begins = texts.offsets(new, begins_text=begins_text), begins_text
        assert offsets == sorted(offsets)
        for token, offset in zip(new, offsets, strict=True):
            spelling = texts.spelling(token)
            if spelling.is_whole and texts.has_text(token):
                own = texts.token_bytes(token, begins_text=begins).decode()
                assert text[offset : offset + len(own)] == own, (new, token)
                num_found += bool(own)
            begins = begins and not texts.has_text(token)
        whole = [token for token in new if texts.spelling(token).is_whole]
        if not begins_text:
            assert texts.added_text([*before, *whole], len(before)) == texts.join_spellings(whole)
    assert num_found > 500


def test_bytes_of_tokens_are_real_ones_also_where_they_are_no_character() -> None:
    for kind, names in (("llama2", ("<0xE2>", "<0x82>", "<0xAC>")), ("byte_level", ("â", "Ĥ", "¬"))):
        tokenizer = tokenizer_of(kind)
        texts = Detokenizer(tokenizer)
        assert b"".join(texts.token_bytes(id_of(tokenizer, name)) for name in names) == "€".encode()
        assert not any(texts.spelling(id_of(tokenizer, name)).is_whole for name in names)
    assert texts.token_bytes(1) == b"<s>"
    assert texts.token_bytes(len(tokenizer_of("byte_level")) + 7) == b""
