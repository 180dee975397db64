"""The byte-level tokenizer gives every text back; other tokenizers are read from where the user says."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from runtime.checkpoint_source.location import load_tokenizer
from runtime.errors import ConfigError
from runtime.store.checkpoint import open_checkpoint
from runtime.synthesize.tokenizer import BOS, MIN_VOCAB_SIZE, byte_level_tokenizer, load_local_tokenizer
from tests.support import SHARED_DATA, Reference

MIXTRAL_TOKENIZER = SHARED_DATA / "tokenizer" / "mixtral_tokenizer.model.v1"
MT_BENCH = SHARED_DATA / "mt_bench" / "question.jsonl"
TEXTS = [
    "",
    " leading, trailing ",
    "tabs\tand\r\nnewlines\n\n",
    "it 's n't . , ! clean - up",
    "déjà vu, 東京, Ġ, 👩‍👩‍👧, \u2028\u0085",
    "\x00\x7f\ufffd",
    f"{BOS} spelled out <|eos|> <|pad|>",
    "".join(map(chr, range(1, 0x250))),
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back_also_after_saving(text: str, tmp_path: Path) -> None:
    made = byte_level_tokenizer(300)
    made.save_pretrained(tmp_path)
    for tokenizer in (made, AutoTokenizer.from_pretrained(tmp_path), load_local_tokenizer(tmp_path)):
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_token_id
        assert len(ids) == 1 + len(text.encode())
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, MIN_VOCAB_SIZE + 1, 512, 8000, 32000])
def test_every_id_decodes_to_something_of_its_own(vocab_size: int) -> None:
    tokenizer = byte_level_tokenizer(vocab_size)
    assert len(tokenizer) == vocab_size
    assert len(set(tokenizer.convert_ids_to_tokens(list(range(vocab_size))))) == vocab_size
    made_up = [tokenizer.decode([index]) for index in range(MIN_VOCAB_SIZE, vocab_size)]
    assert len(set(made_up)) == len(made_up)
    assert all(word.startswith(" ") and word[1:].isalpha() for word in made_up)


def test_specials_pad_on_the_left_and_chat_has_a_template() -> None:
    tokenizer = byte_level_tokenizer(512)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    batch = tokenizer(["a", "abc"], padding=True)["input_ids"]
    assert [row[:3] for row in batch] == [[0, 0, 1], [1, *tokenizer.encode("ab")[1:]]]
    chat = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "user: Hi\nassistant:"


def test_too_few_ids_for_the_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs 259 ids or more, vocab_size is 258"):
        byte_level_tokenizer(258)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "neither a directory nor"),
        (b"no model", "is not a SentencePiece model"),
        ("directory", "transformers cannot load a tokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_refused(content: bytes | str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    if isinstance(content, bytes):
        pytest.importorskip("sentencepiece")
        path.write_bytes(content)
    elif content == "directory":
        path.mkdir()
    with pytest.raises(ConfigError, match=f"tokenizer=.*{message}"):
        load_local_tokenizer(path)


def test_a_sentencepiece_model_keeps_its_own_encoding_also_after_saving(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    if not MIXTRAL_TOKENIZER.exists():
        pytest.skip("the shared data set folder with mixtral_tokenizer.model.v1 is not there")
    model = sentencepiece.SentencePieceProcessor(model_file=str(MIXTRAL_TOKENIZER))
    made = load_local_tokenizer(MIXTRAL_TOKENIZER)
    made.save_pretrained(tmp_path)
    questions = [json.loads(line)["turns"][0] for line in MT_BENCH.read_text().split("\n") if line]
    for tokenizer in (made, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(tokenizer) == 32000
        assert tokenizer.padding_side == "left"
        for text in (*questions, *TEXTS[1:5], "  two", " ", "▁", " a  b "):
            assert tokenizer.encode(text) == [model.bos_id(), *model.encode(text)]
        assert max(len(tokenizer.encode(text)) for text in questions) == 418  # what MoE-Lightning reports


def trained(directory: Path, kind: str) -> Path:
    """A small SentencePiece model of the kind `bpe`, made as Llama's are, or `unigram`."""
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(directory / "tokenizer"), vocab_size=600, model_type=kind,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        split_digits=True, allow_whitespace_only_pieces=True, hard_vocab_limit=False,
    )  # fmt: skip
    (directory / "tokenizer.vocab").unlink()
    return directory / "tokenizer.model"


@pytest.mark.parametrize("names_the_file", [False, True])
def test_a_model_file_alone_is_read_as_sentencepiece_reads_it(
    names_the_file: bool, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    """transformers makes another tokenizer of such a directory: no beginning, no space in front."""
    sentencepiece = pytest.importorskip("sentencepiece")
    shutil.copy(reference("llama").directory / "config.json", tmp_path)
    path = trained(tmp_path, "bpe")
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    directory = reference("llama").directory if names_the_file else tmp_path
    checkpoint = replace(open_checkpoint(reference("llama").directory), path=directory)
    tokenizer = load_tokenizer(str(path) if names_the_file else None, checkpoint)
    assert tokenizer is not None
    for text in (*TEXTS[1:6], "tone nekaka, déjà mi", " ", "  x"):
        ids = tokenizer.encode(text)
        assert ids == [model.bos_id(), *model.encode(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert AutoTokenizer.from_pretrained(tmp_path).encode("tone") != [model.bos_id(), *model.encode("tone")]


def test_a_model_file_alone_of_another_kind_is_refused_where_transformers_spells_otherwise(
    reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    shutil.copy(reference("llama").directory / "config.json", tmp_path)
    trained(tmp_path, "unigram")
    checkpoint = replace(open_checkpoint(reference("llama").directory), path=tmp_path)
    with pytest.raises(ConfigError, match=r"model\.tokenizer=.*tokenizer\.model is not a BPE model like Llama's"):
        load_tokenizer(None, checkpoint)


def test_a_file_that_is_no_sentencepiece_model_is_refused_as_a_tokenizer(
    reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    pytest.importorskip("sentencepiece")
    checkpoint = open_checkpoint(reference("llama").directory)
    (tmp_path / "a.model").write_bytes(b"no model")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.tokenizer=.*a\.model is not a SentencePiece model"):
        load_tokenizer(str(tmp_path / "a.model"), checkpoint)
    with pytest.raises(ConfigError, match=r"model\.tokenizer=.*tokenizer\.json is a file: set it to its directory"):
        load_tokenizer(str(tmp_path / "tokenizer.json"), checkpoint)
