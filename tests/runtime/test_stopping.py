"""A stop string ends a completion with the token that completes it, as in transformers, and the text before it."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, StopStringCriteria
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from runtime import SamplingConfig
from runtime.sequences.detokenizer import Detokenizer, StopStrings
from runtime.sequences.sampler import Sampler
from runtime.sequences.sequence import Completion, FinishReason, Request
from runtime.sequences.sequence import Sequence as Running
from runtime.synthesize.tokenizer import BOS, byte_level_tokenizer
from tests.runtime.sampling_support import (
    References,
    complete,
    logits_for,
    request_of,
    running,
    runtime_for,
    step,
    transformers_answer,
)
from tests.support import NUM_NEW_TOKENS
from tests.tokenizer_kinds import KINDS, tokenizer_of

VOCAB_SIZE = 512
TEXT = "one two END of it — ÄÖ."


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and made-up words of several letters."""
    return byte_level_tokenizer(VOCAB_SIZE)


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def fed(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], stop: Sequence[str], prompt: str = "x") -> Running:
    """A sequence that was given these tokens, up to the one that finished it."""
    sampler = Sampler(SamplingConfig(), vocab_size=VOCAB_SIZE, tokenizer=tokenizer)
    row = running(ids_of(tokenizer, prompt), max_new_tokens=1000, stop=stop)
    for token in ids:
        if row.finish is None:
            step(sampler, [row], logits_for(token, size=VOCAB_SIZE), 0)
    return row


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["END"], "one two "), ([" of", "END"], "one two "), (["two END of"], "one "),
        (["Ö."], "one two END of it — Ä"), (["one"], ""), (["o"], ""), (["absent"], None),
        (["—"], "one two END of it "), (["END of", "ND"], "one two E"), (["ND", "END"], "one two "),
        (["o END", "wo END of"], "one tw"),
    ],
)  # fmt: skip
def test_the_text_ends_before_the_stop_string_and_all_tokens_are_kept(
    stop: list[str], text: str | None, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Every stop string straddles tokens here, umlauts in themselves. Of several, the first one completed counts."""
    ids = ids_of(tokenizer, TEXT)
    row = fed(tokenizer, ids, stop)
    if text is None:
        assert (row.finish, row.text_end, row.generated) == (None, None, ids)
    else:
        assert row.finish is FinishReason.stop
        assert tokenizer.decode(row.generated)[: row.text_end] == text
        assert row.generated == ids[: len(row.generated)]
        assert not any(s in tokenizer.decode(row.generated[:-1]) for s in stop), "it stopped later than it could"


def words(tokenizer: PreTrainedTokenizerFast, *texts: str) -> list[int]:
    """Tokens of more than a byte, by what they decode to."""
    ids = [tokenizer.convert_tokens_to_ids(text.replace(" ", "Ġ")) for text in texts]
    assert all(isinstance(token, int) and token > 258 for token in ids)
    return ids


@pytest.mark.parametrize(
    ("stop", "num_tokens", "text"),
    [
        ("bada", 1, " "), (" baba", 3, " bada bebe"), ("a be", 2, " bad"), ("a bebe ba", 3, " bad"),
        ("da bebe bab", 3, " ba"), ("ada bebe baba", 3, " b"),
    ],
)  # fmt: skip
def test_a_stop_string_may_begin_and_end_within_tokens(
    stop: str, num_tokens: int, text: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    row = fed(tokenizer, words(tokenizer, " bada", " bebe", " baba"), [stop])
    assert len(row.generated) == num_tokens
    assert tokenizer.decode(row.generated)[: row.text_end] == text
    assert row.finish is FinishReason.stop


def test_of_two_stop_strings_that_one_token_completes_the_text_ends_before_both(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    row = fed(tokenizer, words(tokenizer, " bada", " bebe"), ["e", "da be"])
    assert tokenizer.decode(row.generated)[: row.text_end] == " ba"


@pytest.mark.parametrize("stop", ["東京" * 6, "—" * 9, "👩‍👩‍👧"])
def test_a_stop_string_of_many_more_bytes_than_characters_is_found(
    stop: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    row = fed(tokenizer, ids_of(tokenizer, f"before{stop}after"), [stop])
    assert tokenizer.decode(row.generated) == f"before{stop}"
    assert row.text_end == len("before")


def test_a_special_token_is_found_by_its_name_and_parts_what_stands_on_both_sides(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    bos = tokenizer.convert_tokens_to_ids(BOS)
    first, second = ids_of(tokenizer, "st"), ids_of(tokenizer, "op")
    assert isinstance(bos, int)
    assert fed(tokenizer, [*first, bos, *second], ["stop"]).finish is None
    assert fed(tokenizer, [*first, *second, bos], [BOS]).text_end == len("stop")
    assert fed(tokenizer, [*first, *second, bos, *first], [f"op{BOS}s"]).text_end == len("st")


@pytest.mark.parametrize(("prompt", "counts"), [("END", False), ("It is the EN", True), ("one END two", False)])
def test_a_stop_string_may_begin_in_the_prompt_and_ends_in_the_completion(
    prompt: str, counts: bool, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The completion has no text then."""
    ids = ids_of(tokenizer, "D, or not?")
    row = fed(tokenizer, ids, ["END"], prompt)
    assert (row.finish, row.text_end) == ((FinishReason.stop, 0) if counts else (None, None))
    assert row.generated == ids[:1] if counts else ids
    whole = torch.tensor([[*ids_of(tokenizer, prompt), ids[0]]])
    stops_there = bool(StopStringCriteria(tokenizer, ["END"])(whole, None)[0])  # pyright: ignore[reportArgumentType]
    assert stops_there == counts
    apart = replace(row.request, stops_begin_in_prompt=False)
    assert StopStrings(Detokenizer(tokenizer)).find(apart, ids[:1]) is None


NUM_ROWS, NUM_STEPS = 100, 12
STOPS = (
    [" yes", "stop", "\n\n"], ["  ", "the end", "s"], ["é", "京都", "€ "], ["</s>", "a", "yes<pad>"],
    ["answer is yes; no", "stopping", "ß, déjà"], ["#", "##", "'s w"],
)  # fmt: skip


def near_tokens(tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], texts: Detokenizer) -> list[int]:
    """Tokens that a stop string may be made of, and some others."""
    ids = [
        id
        for stop in stops
        for text in (stop, f"x{stop}", stop[1:], f"a {stop}b")
        for id in tokenizer(text)["input_ids"]
    ]
    spelled = [(id, texts.spelling(id).text) for id in range(len(tokenizer))]
    data = [(stop.encode(), stop.encode()[:1]) for stop in stops]
    within = [
        id
        for id, text in spelled
        if text and any(text in stop or stop in text or text.endswith(first) for stop, first in data)
    ]
    return [*ids, *within[:200], *range(0, len(tokenizer) + 2, len(tokenizer) // 40)]


@pytest.mark.parametrize("kind", ["llama2", "gguf_llama", "mixtral"])
def test_a_stop_string_with_a_first_space_is_found_where_a_completion_begins_with_it(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, both = (tuple(tokenizer(text)["input_ids"]) for text in ("The answer is", "The answer is yes"))
    request = Request(id="0", prompt_ids=prompt, max_new_tokens=9, stop=(" yes",))
    assert both[: len(prompt)] == prompt
    assert StopStrings(Detokenizer(tokenizer)).find(request, both[len(prompt) :]) == 0


@pytest.mark.dealt(most=4)
@pytest.mark.parametrize("kind", KINDS)
def test_it_stops_at_the_tokens_at_which_transformers_stops(kind: str) -> None:
    """Behind each token of random rows, whatever kind of tokenizer; and the text ends before the stop string."""
    tokenizer, choose, num_found, num_shown = tokenizer_of(kind), random.Random(kind), 0, 0
    texts = Detokenizer(tokenizer)
    stopping = StopStrings(texts)
    for stops in STOPS[:2] if kind == "mixtral" else STOPS:  # whose vocabulary takes transformers a second each
        tokens = near_tokens(tokenizer, stops, texts)
        rows = [choose.choices(tokens, k=4 + NUM_STEPS) for _ in range(NUM_ROWS)]
        criteria = StopStringCriteria(tokenizer, stops)
        for end in range(5, 5 + NUM_STEPS):
            theirs = criteria(torch.tensor(rows)[:, :end], None).tolist()  # pyright: ignore[reportArgumentType]
            for row, stops_there in zip(rows, theirs, strict=True):
                request = Request(id="0", prompt_ids=tuple(row[:4]), max_new_tokens=99, stop=tuple(stops))
                place = stopping.find(request, row[4:end])
                assert (place is not None) == stops_there, (row[:end], stops)
                if place is not None:
                    text = texts.completion_text(request, row[4:end])
                    num_found, num_shown = num_found + 1, num_shown + text.startswith(tuple(stops), place)
                    assert 0 <= place <= len(text)
    assert num_found > 100
    assert num_shown > 0.7 * num_found, "others begin in the prompt or have a special token's name"


def test_a_run_stops_where_generate_stops_each_row_at_its_own_strings(reference: References) -> None:
    ref = reference("llama")
    model = AutoModelForCausalLM.from_pretrained(ref.directory, dtype=torch.float32).eval()
    sampling = SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    runtime = runtime_for(ref, sampling)
    own = runtime.model.tokenizer
    assert own is not None
    texts = [own.decode(row, skip_special_tokens=True) for row in ref.expected]
    readable = [re.findall(r"[a-z ]{3,}", text) for text in texts]  # random bytes seldom decode to anything
    stops = [[pieces[-1][-3:], pieces[0][1:]] if n % 3 and pieces else [] for n, pieces in enumerate(readable)]
    assert sum(map(bool, stops)) > 2
    requests = [
        request_of(runtime, str(n), prompt, stop=stop)
        for n, (prompt, stop) in enumerate(zip(ref.prompts, stops, strict=True))
    ]
    for completion, prompt, stop, text in zip(complete(runtime, requests), ref.prompts, stops, texts, strict=True):
        given = {"stop_strings": stop, "tokenizer": own} if stop else {}
        assert list(completion.token_ids) == transformers_answer(model, prompt, 0, sampling, **given)
        place = min((text.find(s) for s in stop), default=len(text))
        assert completion.text == text[:place]
        assert (completion.finish is FinishReason.stop) == bool(stop)


def test_stop_strings_of_the_run_are_those_of_every_request_without_its_own(reference: References) -> None:
    ref = reference("llama")
    plain = runtime_for(ref, SamplingConfig(max_new_tokens=8, ignore_eos=True)).generate(ref.prompts[:1])[0]
    assert isinstance(plain, Completion)
    runtime = runtime_for(ref, SamplingConfig(max_new_tokens=8, ignore_eos=True, stop=[plain.text[3:5]]))
    requests = [request_of(runtime, "a", ref.prompts[0]), request_of(runtime, "b", ref.prompts[0], stop=[])]
    stopped, whole = complete(runtime, requests)
    assert (stopped.text, stopped.finish) == (plain.text[: plain.text.find(plain.text[3:5])], FinishReason.stop)
    assert (whole.token_ids, whole.finish) == (plain.token_ids, FinishReason.length)
