"""Stop strings: where the first one begins in the text of a completion.

The text is what its tokens decode to, special tokens left out. A stop string may straddle tokens, and tokens may
straddle its characters. Only the completion counts: transformers' `StopStringCriteria` also takes a stop string that
begins in the prompt, and the completion could not end before that one.
"""

from collections.abc import Sequence as Rows
from itertools import islice

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

SPARE_TOKENS = 8  # a window's first tokens may decode otherwise than in the whole: a character cut, a space dropped


class StopStrings:
    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._silent = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}

    def find(self, token_ids: Rows[int], stops: Rows[str], num_new: int = 1) -> int | None:
        """Characters of text before the first of `stops`, None where the text has none.

        To be asked after each token, or after `num_new`: it decodes only the last ones, until a stop string shows among
        them.
        """
        window = (
            SPARE_TOKENS + num_new - 1 + max(len(stop.encode()) for stop in stops)
        )  # a token has a byte of text or more
        tail = list(islice((token for token in reversed(token_ids) if token not in self._silent), window))
        if _first(stops, decode_text(self._tokenizer, tail[::-1])) is None:
            return None
        return _first(stops, decode_text(self._tokenizer, token_ids))


def _first(stops: Rows[str], text: str) -> int | None:
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def decode_text(tokenizer: PreTrainedTokenizerBase, token_ids: Rows[int], *, keeps_special: bool = False) -> str:
    text = tokenizer.decode(list(token_ids), skip_special_tokens=not keeps_special)
    assert isinstance(text, str), "one list of ids gives one text"
    return text
