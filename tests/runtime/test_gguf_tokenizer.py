"""A GGUF file's text is cut by the rule that the file names, or the file is refused."""

import json
import logging
import random
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from runtime.checkpoint_source.gguf_tokenizer import BY_NAME, RULES, load_gguf_tokenizer
from runtime.checkpoint_source.location import load_tokenizer
from runtime.errors import CheckpointError
from runtime.store.checkpoint import Checkpoint
from runtime.store.gguf import read_gguf
from runtime.synthesize.tokenizer import byte_level_tokenizer
from tests.gguf_files import write_vocabulary

THEIRS = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping", reason="from 5.18 on")

TEXT = "I'LL add  12345 kg, x²=3.50!\n\n  naïve McDo, 東京2です… (a/b)\n"
# Pieces of TEXT. For each name tokens of 1,754 texts were compared with those of llama.cpp (xllamacpp 2026.10.11549; a
# vocabulary whose tokens reach across such borders). They differ only where its engine approximates an expression: the
# cases of letters (tekken, gpt-4o, youtu), `\b` (tiny_aya), rare blanks in ranges (deepseek-llm, -coder).
PIECES = {
    "gpt-2": "I|'|LL| add| | 12345| kg|,| x|²|=|3|.|50|!|\n\n | naïve| McDo|,| 東京|2|です|…| (|a|/|b|)|\n",
    "smollm": "I|'|LL| add|  |1|2|3|4|5| kg|,| x|²|=|3|.|5|0|!|\n\n | naïve| McDo|,| 東京|2|です|…| (|a|/|b|)|\n",
    "falcon": "I|'|LL| add| | |123|45| kg|,| x|²|=|3|.|50|!|\n\n | naïve| McDo|,| 東京|2|です|…| |(|a|/|b|)|\n",
    "llama-bpe": "I|'LL| add| | |123|45| kg|,| x|²|=|3|.|50|!\n\n| | naïve| McDo|,| 東京|2|です|…| (|a|/b|)\n",
    "glm4": "I|'LL| add| | |123|45| kg|,| x|²|=|3|.|50|!\n\n| | naïve| McDo|,| 東京|2|です|…| (|a|/b|)\n",
    "qwen2": "I|'LL| add| | |1|2|3|4|5| kg|,| x|²|=|3|.|5|0|!\n\n| | naïve| McDo|,| 東京|2|です|…| (|a|/b|)\n",
    "tekken": "I|'LL| add| | |1|2|3|4|5| kg|,| x|²|=|3|.|5|0|!\n\n| | naïve| Mc|Do|,| 東京|2|です|…| (|a|/b|)\n",
    "gpt-4o": "I'LL| add| | |123|45| kg|,| x|²|=|3|.|50|!\n\n| | naïve| Mc|Do|,| 東京|2|です|…| (|a|/b|)\n",
    "tiny_aya": "I'LL| add|  |12|345| kg|,| x|²|=|3|.|50|!\n\n| | naïve| Mc|Do|,| 東京|2|です|…| (|a|/b|)\n",
    "deepseek-llm": (
        "I|'|LL| add|  |12345| kg|,| x|²|=|3|.|50|!|\n|\n| | na|ï|ve| McDo|,| |東京|2|です…| (|a|/|b|)|\n"
    ),
    "deepseek-coder": (
        "I|'|LL| add|  |1|2|3|4|5| kg|,| x|²|=|3|.|5|0|!|\n|\n| | naïve| McDo|,| |東京|2|です|…| (|a|/|b|)|\n"
    ),
    "deepseek-v3": "I|'LL| add|  |123|45| kg|,| x|²|=|3|.|50|!\n\n| | naïve| McDo|,| |東京|2|です|…| (|a|/b|)\n",
    "bloom": "I'LL| add| | 12345| kg|,| x²=3|.|50|!\n\n | naïve| McDo|,| 東京2です|… (|a/b|)\n",
    "viking": "I'LL| add| | |1|2|3|4|5| kg|,| x|²|=|3|.|5|0|!\n\n | naïve| McDo|,| 東京|2|です|… (|a/b|)\n",
    "youtu": "I'LL| add| | |1|2|3|4|5| kg|,| x|²|=|3|.|5|0|!\n\n| | naïve| Mc|Do|,| |東京|2|です|…| (|a|/b|)\n",
    "minicpm5": "I|'LL| add|  |123|45| kg|,| x|²|=|3|.|50|!\n\n| | naïve| McDo|,| 東京|2|です|…| (|a|/b|)\n",
    "seed-coder": "I|'LL| add| | |1|2|3|4|5| kg|,| x|²|=|3|.|5|0|!|\n\n| | naïve| McDo|,| 東京|2|です|…| (|a|/b|)|\n",
    "laguna": "I|'LL| add| | |1|2|3|4|5| kg|,| x|²|=|3|.|5|0|!|\n\n| | naïve| McDo|,| 東京|2|です|…| (|a|/b|)|\n",
    "exaone-moe": "I|'LL| add| | |1|2|3|4|5| kg|,| x|²|=|3|.|5|0|!\n|\n| | naïve McDo|,| 東京|2|です|…| (|a|/b|)\n",
}
PARTS = (
    "Word", "HELLO", "mcD", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "1", "12345", "²", "٣", "'s", "'LL",
    "don't", "東", "カ", "한국", "हिन्दी", "é", "e\u0301", "ǅ", ".", "…", "。", "(", "|", "$", "^", "_", "/", "👩",
    "\u200b", "\u2028", "\x00",
)  # fmt: skip
BLANKS = ["Ġ Ġ", "ĠĠ ĠĠ", "Ċ ĠĠĠĠ", "1 2", "a b"]  # a line's indent is one token, and so are some digits


def loaded(path: Path, merges: list[str], **settings: str | int | bool) -> PreTrainedTokenizerBase:
    file = write_vocabulary(path / "v.gguf", merges, {"bos_token_id": 0, "eos_token_id": 1, **settings})
    return load_gguf_tokenizer(file, read_gguf(file), "here")


def pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cut]


@pytest.mark.parametrize("name", PIECES)
def test_text_is_cut_by_the_rule_that_the_file_names(name: str, tmp_path: Path) -> None:
    assert pieces(loaded(tmp_path, BLANKS, pre=name), TEXT) == PIECES[name].split("|")


def test_names_that_transformers_knows_mean_what_they_mean_there() -> None:
    draw = random.Random(0)
    texts = ["".join(draw.choices(PARTS, k=12)) for _ in range(300)]
    assert len(THEIRS.GGUF_PRE_TOKENIZER_SPLITS.keys() & BY_NAME.keys()) >= 23
    for name, expression in THEIRS.GGUF_PRE_TOKENIZER_SPLITS.items():
        theirs = pre_tokenizers.Split(Regex(expression), "isolated")
        ours = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(e), "isolated") for e in BY_NAME[name].splits])
        for text in texts:
            assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), (name, text)


def test_no_name_means_two_rules() -> None:
    names = [name for names in RULES.values() for name in names.split()]
    assert len(names) == len(set(names)) == len(BY_NAME)


def test_blanks_before_a_digit_are_one_token_where_digits_are_cut_first(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, BLANKS, pre="smollm")
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    by_hand = Tokenizer(models.BPE(model["vocab"], [tuple(merge) for merge in model["merges"]]))
    by_hand.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = ["ab:\n    0.5", "ab  12", "    ab 12"]
    assert [tokenizer(text)["input_ids"] for text in texts] == [by_hand.encode(text).ids for text in texts]
    assert tokenizer.tokenize("ab:\n    0.5") == ["ab", ":", "ĊĠĠĠĠ", "0", ".", "5"]
    assert loaded(tmp_path, BLANKS, pre="gpt-2").tokenize("ab:\n    0.5") != tokenizer.tokenize("ab:\n    0.5")


@pytest.mark.parametrize("name", ["kimi-k2", "smollm9"])
def test_a_rule_that_is_not_known_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.pre='{name}': .*model\.tokenizer=DIR_OR_HUB_ID"):
        loaded(tmp_path, BLANKS, pre=name)


def test_another_tokenizer_stands_in_for_a_rule_that_is_not_known(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "v.gguf", BLANKS, {"pre": "kimi-k2"})
    byte_level_tokenizer(300).save_pretrained(tmp_path / "other")
    checkpoint = Checkpoint(path=file, tensors={}, gguf=read_gguf(file))
    with pytest.raises(CheckpointError, match="kimi-k2"):
        load_tokenizer(None, checkpoint)
    tokenizer = load_tokenizer(str(tmp_path / "other"), checkpoint)
    assert tokenizer is not None
    assert len(tokenizer) == 300


@pytest.mark.parametrize("said", [{}, {"pre": "default"}])
def test_a_file_that_names_no_rule_is_cut_by_that_of_gpt2_and_says_so(
    said: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = loaded(tmp_path, BLANKS, **said)
    assert pieces(tokenizer, TEXT) == PIECES["gpt-2"].split("|")
    assert "does not name its pre-tokenization rule" in caplog.text


@pytest.mark.parametrize(("name", "first"), [("llama-bpe", "abc"), ("tekken", "abc"), ("gpt-2", "a"), ("qwen2", "a")])
def test_a_word_of_the_vocabulary_is_one_token_where_merges_do_not_count(name: str, first: str, tmp_path: Path) -> None:
    """As in llama.cpp and in these models' own tokenizer.json (ignore_merges); `b c` comes first, nothing joins `a`."""
    assert loaded(tmp_path, ["b c", "a b", "ab c"], pre=name).tokenize("abc")[0] == first


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ({"pre": "llama-bpe"}, True),
        ({"pre": "tekken"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "qwen2"}, False),
        ({"pre": "qwen2", "add_bos_token": True}, True),
    ],
)
def test_prompts_begin_with_bos_where_the_rule_or_the_file_says_so(
    settings: dict[str, str | bool], begins: bool, tmp_path: Path
) -> None:
    ids = loaded(tmp_path, BLANKS, **settings)("ab")["input_ids"]
    assert (ids[0] == 0) is begins
    assert len(ids) == 1 + begins


def test_what_lies_beside_the_file_has_no_say(tmp_path: Path) -> None:
    alone = loaded(tmp_path, BLANKS, pre="smollm")(TEXT)["input_ids"]
    byte_level_tokenizer(300).save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    assert loaded(tmp_path, BLANKS, pre="smollm")(TEXT)["input_ids"] == alone
