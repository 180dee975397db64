"""Small tokenizers of every kind that models come with, trained on the spot, and Mixtral's own where it lies."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from runtime.synthesize.tokenizer import byte_level_tokenizer, load_local_tokenizer
from tests.support import SHARED_DATA

MIXTRAL_TOKENIZER = SHARED_DATA / "tokenizer" / "mixtral_tokenizer.model.v1"
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
VOCAB_SIZE = 512  # as the model `random` has
EOS_ID = 2
TEXT = """The answer is yes; no answer is a long answer. It's what "they" don't say: one, two, three.
def first(values: list[int]) -> int:
    return values[0] if values else -1

Der Fuß, déjà vu, größer als früher; Ελληνικά, русский текст, 東京と京都, 서울. 👩‍👩‍👧 — 50 € • ½
abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789 {"key": [true, false, null]} <b>x</b>
the words that they and their texts are made of: stop stopped stopping stops, end ending ended ends, yes and no"""
LINES = [line for line in (*TEXT.split("\n"), *TEXT.split("\n\n"), TEXT) if line] * 2


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    pad, bos, eos, unk = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _trained(
    tokenizer: Tokenizer, trainer: trainers.Trainer, decoder: decoders.Decoder, cut: pre_tokenizers.PreTokenizer
) -> Tokenizer:
    tokenizer.pre_tokenizer = cut
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.decoder = decoder
    return tokenizer


def _bpe_trainer(*byte_tokens: str, alphabet: list[str] | None = None) -> trainers.Trainer:
    return trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[*SPECIAL, *byte_tokens], initial_alphabet=alphabet or [],
        show_progress=False,
    )  # fmt: skip


def byte_level() -> PreTrainedTokenizerFast:
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = _bpe_trainer(alphabet=pre_tokenizers.ByteLevel.alphabet())
    return _wrapped(_trained(Tokenizer(models.BPE()), trainer, decoders.ByteLevel(), cut))


SPACES, WORDS = normalizers.Replace(" ", "▁"), pre_tokenizers.Split("▁", "merged_with_next")


def _sentencepiece(normalizer: normalizers.Normalizer, *last: decoders.Decoder) -> PreTrainedTokenizerFast:
    """BPE with byte fallback; its byte tokens are ordinary ones, as those of published tokenizers."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[3], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizer
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    state = json.loads(_trained(tokenizer, _bpe_trainer(*BYTE_TOKENS), decoder, WORDS).to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL]
    return _wrapped(Tokenizer.from_str(json.dumps(state)))


def llama2() -> PreTrainedTokenizerFast:
    """A space in front of each text, which the decoder strips."""
    return _sentencepiece(normalizers.Sequence([normalizers.Prepend("▁"), SPACES]), decoders.Strip(" ", 1, 0))


def gemma() -> PreTrainedTokenizerFast:
    return _sentencepiece(SPACES)


def mistral_without_prefix() -> PreTrainedTokenizerFast:
    """No space in front of a text, and a decoder that strips one all the same."""
    return _sentencepiece(SPACES, decoders.Strip(" ", 1, 0))


def metaspace_without_prefix() -> PreTrainedTokenizerFast:
    cut, decoder = pre_tokenizers.Metaspace(prepend_scheme="never"), decoders.Metaspace(prepend_scheme="never")
    return _wrapped(_trained(Tokenizer(models.BPE(unk_token=SPECIAL[3])), _bpe_trainer(), decoder, cut))


def t5() -> PreTrainedTokenizerFast:
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), unk_token=SPECIAL[3], show_progress=False
    )
    tokenizer = _trained(Tokenizer(models.Unigram()), trainer, decoders.Metaspace(), pre_tokenizers.Metaspace())
    return _wrapped(tokenizer)


def wordpiece() -> PreTrainedTokenizerFast:
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), show_progress=False)
    cut = pre_tokenizers.BertPreTokenizer()
    return _wrapped(_trained(Tokenizer(models.WordPiece(unk_token=SPECIAL[3])), trainer, decoders.WordPiece(), cut))


def cleaned_wordpiece() -> PreTrainedTokenizerFast:
    """Spaces before punctuation go once the text is made."""
    tokenizer = wordpiece()
    tokenizer.clean_up_tokenization_spaces = True
    return tokenizer


def word_ends() -> PreTrainedTokenizerFast:
    """A space stands behind the last token of a word, once another follows."""
    suffix, cut = "</w>", pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), end_of_word_suffix=suffix, show_progress=False
    )
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[3], end_of_word_suffix=suffix))
    return _wrapped(_trained(tokenizer, trainer, decoders.BPEDecoder(suffix), cut))


def _of_gguf(kind: str, source: PreTrainedTokenizerFast) -> PreTrainedTokenizerBase:
    """What transformers makes of the source's vocabulary in a GGUF file."""
    model = json.loads(source.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = {
        **dict.fromkeys(tokens, gguf.TokenType.NORMAL),
        **{token: gguf.TokenType.BYTE for token in BYTE_TOKENS if token in model["vocab"]},
        **dict.fromkeys(SPECIAL, gguf.TokenType.CONTROL),
    }
    with TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder, "model.gguf"), "llama")
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(rank) for rank in range(len(tokens))])
        writer.add_token_types([kinds[token] for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        writer.add_pad_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(EOS_ID)
        writer.add_unk_token_id(3)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")


def gguf_llama() -> PreTrainedTokenizerBase:
    return _of_gguf("llama", llama2())


def gguf_byte_level() -> PreTrainedTokenizerBase:
    return _of_gguf("gpt2", byte_level())


def bytes_and_syllables() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer(VOCAB_SIZE)


def mixtral() -> PreTrainedTokenizerBase:
    pytest.importorskip("sentencepiece")
    if not MIXTRAL_TOKENIZER.exists():
        pytest.skip("the shared data set folder with mixtral_tokenizer.model.v1 is not there")
    return load_local_tokenizer(MIXTRAL_TOKENIZER)


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    made.__name__: made
    for made in (
        byte_level, bytes_and_syllables, llama2, gemma, mistral_without_prefix, metaspace_without_prefix, t5, wordpiece,
        gguf_llama, gguf_byte_level, mixtral, cleaned_wordpiece, word_ends,
    )
}  # fmt: skip
# Whose tokens add the same anywhere in a text, so that a token has a text.
EVEN = [kind for kind in KINDS if kind not in ("cleaned_wordpiece", "word_ends")]


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    return KINDS[kind]()
