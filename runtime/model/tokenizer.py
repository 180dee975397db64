"""Tokenizers for checkpoints that we write ourselves: byte-level, built on the spot, or the user's own."""

import itertools
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ConfigError

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SPECIAL_TOKENS = (PAD, BOS, EOS)  # ids 0, 1, 2, as in Llama's own order
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
_SPACE = "Ġ"  # how a byte-level vocabulary spells the space byte
_SYLLABLES = tuple(a + b for a, b in itertools.product("bdfgklmnprstvz", "aeiou"))
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_PROBE = "The quick brown fox: 1234 déjà vu, 東京! \n\n  def f(x): return x**2"


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
    words = (
        *SPECIAL_TOKENS,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *_made_up_words(vocab_size - MIN_VOCAB_SIZE),
    )
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
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
        chat_template=_CHAT_TEMPLATE,
    )


def _made_up_words(count: int) -> list[str]:
    """Distinct words of two syllables or more, each with its leading space, always the same ones."""
    lengths = itertools.count(2)
    words = ("".join((_SPACE, *word)) for n in lengths for word in itertools.product(_SYLLABLES, repeat=n))
    return list(itertools.islice(words, count))


def tokenizer_from(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a local directory, or the one of a SentencePiece BPE model file.

    Raises ConfigError (key `tokenizer`) when nothing usable lies there or sentencepiece is not installed.
    """
    if path.is_file():
        return _from_sentencepiece(path)
    if not path.is_dir():
        raise ConfigError(f"tokenizer={path} is neither a directory nor a SentencePiece model file")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer={path} holds no tokenizer that transformers can read: {error}") from error


def _from_sentencepiece(path: Path) -> LlamaTokenizer:
    """Llama's tokenizer class around the model's pieces: SentencePiece merges the pair with the best score first.

    Ids are those of SentencePiece itself, but for a text that begins with a space, where the class adds no second one.
    """
    try:
        from sentencepiece import SentencePieceProcessor  # an optional extra
    except ImportError as error:
        raise ConfigError(
            f"tokenizer={path} is a SentencePiece model, which needs the extra: pip install 'millrace[sentencepiece]'"
        ) from error
    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"tokenizer={path} is not a SentencePiece model: {error}") from error
    vocab = {model.id_to_piece(index): index for index in range(model.vocab_size())}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(vocab, key=lambda piece: -model.get_score(vocab[piece]))
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    controls = [piece for piece, index in vocab.items() if model.is_control(index)]
    tokenizer = LlamaTokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=model.id_to_piece(model.unk_id()),
        bos_token=model.id_to_piece(model.bos_id()),
        eos_token=model.id_to_piece(model.eos_id()),
        additional_special_tokens=controls,
        add_bos_token=True,
    )
    if tokenizer.encode(_PROBE, add_special_tokens=False) != model.encode(_PROBE):
        raise ConfigError(f"tokenizer={path} is not a BPE model in Llama's manner: give a tokenizer directory instead")
    return tokenizer
