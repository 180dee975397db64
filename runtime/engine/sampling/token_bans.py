"""Which token ids `sampling` names, and whether the model knows them."""

from collections.abc import Iterator
from collections.abc import Sequence as Rows

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...config import SamplingConfig, require


def require_known_tokens(config: SamplingConfig, vocab_size: int) -> None:
    """Raises ConfigError where a setting names a token that the model does not have."""
    for key, token in _named_tokens(config):
        known = f"the model's vocabulary of {vocab_size:,} (0 to {vocab_size - 1:,})"
        require(0 <= token < vocab_size, f"sampling.{key}: token id {token} is outside {known}")


def _named_tokens(config: SamplingConfig) -> Iterator[tuple[str, int]]:
    ends = config.forced_eos_token_id
    lists: dict[str, Rows[int]] = {
        "suppress_tokens": config.suppress_tokens or [],
        "begin_suppress_tokens": config.begin_suppress_tokens or [],
        "forced_bos_token_id": [] if config.forced_bos_token_id is None else [config.forced_bos_token_id],
        "forced_eos_token_id": [] if ends is None else [ends] if isinstance(ends, int) else ends,
        "bad_words_ids": [token for word in config.bad_words_ids or [] for token in word],
        "sequence_bias": _biased(config.sequence_bias or []),
    }
    return ((key, token) for key, tokens in lists.items() for token in tokens)


def _biased(pairs: Rows[Rows[list[int] | float]]) -> list[int]:
    return [token for pair in pairs for part in pair if isinstance(part, list) for token in part]


def bad_word_ids(
    words: Rows[str], tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int], vocab_size: int
) -> list[list[int]]:
    """Each word as the tokenizer spells it at the beginning of a text and after a space, special tokens left out:
    transformers' own advice for `bad_words_ids`. Another spelling of the same text in tokens is not banned.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word}"):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            require(bool(ids), f"sampling.bad_words: {word!r} has no tokens")
            require(max(ids) < vocab_size, f"sampling.bad_words: {word!r} has tokens outside the model's vocabulary")
            is_end = len(ids) == 1 and ids[0] in eos_token_ids
            require(not is_end, f"sampling.bad_words: {word!r} ends a completion; use sampling.ignore_eos=true")
            found[tuple(ids)] = None
    return [list(ids) for ids in found]
