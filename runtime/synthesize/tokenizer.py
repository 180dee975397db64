"""Tokenizers for checkpoints that we write ourselves: byte-level, built on the spot, or the user's own."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ConfigError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SPECIAL_TOKENS = (PAD, BOS, EOS)  # ids 0, 1, 2, as in Llama's own order
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
_SPACE = "Ġ"  # how a byte-level vocabulary spells the space byte
_SYLLABLES = tuple(a + b for a, b in itertools.product("bdfgklmnprstvz", "aeiou"))
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_PROBE_PIECES = 2000
_PROBE = "  The quick brown fox: 1234 déjà vu, 東京! \n\n  def f(x): return x**2 "


def byte_level_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `vocab_size` ids: pad, bos, eos, the 256 bytes, then made-up words.

    Any text becomes bos and one id per UTF-8 byte, and decodes back exactly (`skip_special_tokens=True`); special
    tokens spelled out in a text are plain text. Only a model yields a made-up word, which decodes to syllables.
    Raises ConfigError when the ids cannot hold every byte.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"a byte-level tokenizer needs {MIN_VOCAB_SIZE} ids or more, vocab_size is {vocab_size}: raise vocab_size"
        )
    # Distinct words of two syllables or more, each with its leading space, always the same ones.
    lengths = itertools.count(2)
    made_up = ("".join((_SPACE, *word)) for n in lengths for word in itertools.product(_SYLLABLES, repeat=n))
    words = (
        *SPECIAL_TOKENS,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *itertools.islice(made_up, vocab_size - MIN_VOCAB_SIZE),
    )
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return wrap_tokenizer(tokenizer, _CHAT_TEMPLATE)


def wrap_tokenizer(tokenizer: Tokenizer, chat_template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose first ids are SPECIAL_TOKENS, as transformers wants one: texts begin with bos, and
    special tokens that are spelled out in a text are plain text. Mutates `tokenizer`."""
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        chat_template=chat_template,
    )


class UnsupportedSentencePieceError(ConfigError):
    """A SentencePiece model of another kind than the one that Llama's tokenizers are made of."""


def load_local_tokenizer(path: Path, key: str = "tokenizer") -> PreTrainedTokenizerBase:
    """The tokenizer in a local directory, or the one of a SentencePiece BPE model file.

    Raises ConfigError (naming `key`) when nothing usable lies there or sentencepiece is not installed.
    """
    if path.is_file():
        return _from_sentencepiece(path, key)
    if not path.is_dir():
        raise ConfigError(f"{key}={path} is neither a directory nor a SentencePiece model file")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={path} holds no tokenizer that transformers can read: {error}") from error


def find_sentencepiece(place: Path) -> Path | None:
    """The SentencePiece model that is all a directory says of its tokenizer, or that `place` is; None where there is
    more, or none."""
    if place.is_file():
        return place if place.suffix == ".model" or ".model." in place.name else None
    if any(any(place.glob(pattern)) for pattern in ("tokenizer*.json", "vocab*", "merges.txt", "added_tokens.json")):
        return None
    models = sorted(place.glob("*.model"))
    return models[0] if len(models) == 1 else None


def tokenizes_like_file(tokenizer: PreTrainedTokenizerBase, path: Path, key: str) -> bool:
    """Whether texts become the tokens that the SentencePiece model at `path` itself gives."""
    return _tokenizes_like(tokenizer, _open_sentencepiece(path, key))


def _tokenizes_like(tokenizer: PreTrainedTokenizerBase, model: "SentencePieceProcessor") -> bool:
    """Tried with a text of all sorts, and with the model's own words, of which it may make others."""
    indices = range(0, model.vocab_size(), max(1, model.vocab_size() // _PROBE_PIECES))
    special = (model.is_control, model.is_byte, model.is_unknown, model.is_unused)
    own = [model.id_to_piece(index) for index in indices if not any(kind(index) for kind in special)]
    texts = (_PROBE, "".join(own).replace("▁", " "), "".join(reversed(own)).replace("▁", " "))
    return all(tokenizer.encode(text, add_special_tokens=False) == model.encode(text) for text in texts)


def _open_sentencepiece(path: Path, key: str) -> "SentencePieceProcessor":
    try:
        from sentencepiece import SentencePieceProcessor  # an optional extra
    except ImportError as error:
        raise ConfigError(
            f"{key}={path} is a SentencePiece model, which needs the extra: pip install 'weightstream[sentencepiece]'"
        ) from error
    try:
        return SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{key}={path} is not a SentencePiece model: {error}") from error


def _from_sentencepiece(path: Path, key: str) -> PreTrainedTokenizerFast:
    """Llama's tokenizer around the model's pieces: SentencePiece merges the pair with the best score first.

    Ids are those of SentencePiece itself, with its beginning of a text in front; but special tokens that are spelled
    out in a text are special tokens, as everywhere in transformers.
    """
    model = _open_sentencepiece(path, key)
    vocab = {model.id_to_piece(index): index for index in range(model.vocab_size())}
    if min(model.unk_id(), model.bos_id(), model.eos_id()) < 0:
        raise _unsupported_model(path, key)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(vocab, key=lambda piece: -model.get_score(vocab[piece]))
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    controls = [piece for piece, index in vocab.items() if model.is_control(index)]
    unk, bos, eos = (model.id_to_piece(index) for index in (model.unk_id(), model.bos_id(), model.eos_id()))
    backend = LlamaTokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=unk,
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=controls,
        add_bos_token=True,
    ).backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None  # of Llama's class: it takes a text's own first space for the one that is put there
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=unk,
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=controls,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    if not _tokenizes_like(tokenizer, model):
        raise _unsupported_model(path, key)
    return tokenizer


def _unsupported_model(path: Path, key: str) -> UnsupportedSentencePieceError:
    return UnsupportedSentencePieceError(
        f"{key}={path} is not a BPE model in Llama's manner: give a tokenizer directory instead"
    )
