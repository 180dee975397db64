"""Text of tokens in their context, and stop strings in it. Decoded alone, tokens come to another text than behind
others: a SentencePiece decoder strips the first space of a text, and a character may lie in several tokens.
"""

import re
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from .sequence import Request
from itertools import chain, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sequence import Request

CONTEXT_TOKENS = 8  # of a window the first ones may decode otherwise: a character cut, a space dropped
STATIC_PREFIX = "abcdef"  # transformers' own, which a token's text is found behind
BYTE_TOKEN = re.compile("<0x([0-9a-fA-F]{2})>")
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of a byte-level vocabulary


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """What a token adds in the midst of a text. `is_byte`: it is one of a byte fallback, whose neighbours say what it
    decodes to."""

    text: bytes = b""
    is_known: bool = True
    is_byte: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it has no part of a character, whatever stands beside it."""
        if self.is_byte:
            return False
        try:
            self.text.decode()
        except UnicodeDecodeError:
            return False
        return True


class Detokenizer:
    """`start_token_id`: what a decoder behind an encoder begins with, which is all that stands before its completions;
    None without one. Special tokens have no text, as with `skip_special_tokens`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, start_token_id: int | None = None):
        self._tokenizer, self._start_token_id = tokenizer, start_token_id
        self._spellings: dict[int, Spelling] = {}
        self._special_ids = frozenset(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)

    def decode(self, ids: Rows[int], *, keeps_special: bool = False) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=not keeps_special)
        assert isinstance(text, str), "one list of ids gives one text"
        return text

    def prompt_ids(self, request: "Request") -> tuple[int, ...]:
        """The tokens that a request's completion stands behind."""
        return request.prompt_ids if self._start_token_id is None else (self._start_token_id,)

    def completion_text(self, request: "Request", ids: Rows[int], begin: int = 0) -> str:
        """The text that `ids[begin:]`, generated for a request, add to its prompt and the ids before them. Where they
        follow a grammar it is the text that the grammar saw, also where a text would begin with them."""
        if request.grammar is not None:
            return self.join_spellings(ids[begin:])
        prompt = self.prompt_ids(request)
        return self.added_text([*prompt, *ids], len(prompt) + begin)

    def added_text(self, ids: Rows[int], begin: int, end: int | None = None) -> str:
        """The text of `ids[:end]` less that of `ids[:begin]`. Where the first does not begin with the second, as they
        part in the midst of a character, it is less what both begin with, so that no text is lost."""
        context = self._context(ids, begin)
        before, both = self.decode(context), self.decode([*context, *ids[begin:end]])
        return both[_num_common(before, both) :]

    def _context(self, ids: Rows[int], end: int) -> list[int]:
        """The last of `ids[:end]`, behind which tokens come to the same text as behind all of them: some that have a
        text, and no run of byte tokens cut."""
        tail: list[int] = []
        num_tokens = CONTEXT_TOKENS
        for place in range(end - 1, -1, -1):
            token = ids[place]
            if not self.has_text(token):
                continue
            tail.append(token)
            if len(tail) >= num_tokens and not self.spelling(token).is_byte:
                if self.decode(tail[::-1]):
                    break
                num_tokens = 2 * len(tail)
        return tail[::-1]

    def has_text(self, token: int) -> bool:
        return token not in self._special_ids and self.spelling(token).is_known

    def join_spellings(self, ids: Rows[int]) -> str:
        """Their text in the midst of another, where no first space is dropped."""
        return b"".join(self.spelling(id).text for id in ids if self.has_text(id)).decode(errors="replace")

    def token_bytes(self, token: int, *, begins_text: bool = False) -> bytes:
        """What a token adds to the text before it, or where there is none to nothing; special ones their names."""
        spelling = self.spelling(token)
        if not begins_text or not spelling.is_whole or not self.has_text(token):
            return spelling.text
        return self.decode([token]).encode()

    def spelling(self, token: int) -> Spelling:
        """What a token adds in the midst of a text, as in transformers' `StopStringCriteria`; special ones by name."""
        found = self._spellings.get(token)
        if found is None:
            found = self._spellings[token] = self._spelling(token)
        return found

    def _spelling(self, token: int) -> Spelling:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):  # a head may have more rows than the tokenizer has tokens
            return Spelling(is_known=False)
        if self._mode == "ByteLevel" and all(character in BYTES for character in name):
            return Spelling(text=bytes(BYTES[character] for character in name))
        if self._mode == "ByteFallback" and (match := BYTE_TOKEN.fullmatch(name)):
            return Spelling(text=bytes([int(match[1], 16)]), is_byte=True)
        ids, prefix = self._prefix
        text = self._tokens_to_string([*ids, token])
        return Spelling(text=text[max(0, text.find(prefix)) + len(prefix) :].encode())

    @cached_property
    def _mode(self) -> str | None:
        """How the vocabulary holds bytes. The decoder's state is its JSON."""
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        state = bytes(decoder.__getstate__()) if decoder is not None else b""
        return next((kind for kind in ("ByteFallback", "ByteLevel") if f'"{kind}"'.encode() in state), None)

    @cached_property
    def _prefix(self) -> tuple[list[int], str]:
        """Tokens that others are spelled behind, and their text: transformers' own, or where the tokenizer cannot spell
        it the first token that has a text."""
        ids = list(self._tokenizer(STATIC_PREFIX, add_special_tokens=False)["input_ids"])
        if STATIC_PREFIX in self._tokens_to_string(ids):
            return ids, STATIC_PREFIX
        known = sorted({*self._tokenizer.get_vocab().values()} - self._special_ids)
        texts = ((id, self._tokens_to_string([id])) for id in known)
        return next((([id], text) for id, text in texts if text.isalnum()), ([], ""))

    def _tokens_to_string(self, ids: list[int]) -> str:
        """Their text, special tokens by name."""
        names = (self._tokenizer.convert_ids_to_tokens(id) for id in ids)
        return self._tokenizer.convert_tokens_to_string([name for name in names if isinstance(name, str)])

    def offsets(self, ids: Rows[int], *, begins_text: bool) -> list[int]:
        """How many characters of the text of `ids` stand before each of them; of a part of a character, before it.
        `begins_text`: nothing stands before them all."""
        context = [] if begins_text else self._prefix[0]
        known, found, num_characters = [*context, *ids], list[int](), 0
        first = len(context)
        starts = [i for i in range(first, len(known)) if i == first or self._is_stable_boundary(known[i])]
        for start, end in pairwise([*starts, len(known)]):
            text = self.added_text(known, start, end)
            parts = (self.added_text(known, start, place) for place in range(start + 1, end))
            settled = accumulate((_num_common(text, part) for part in parts), max, initial=0)
            found += [num_characters + num_settled for num_settled in settled]
            num_characters += len(text)
        return found

    def _is_stable_boundary(self, token: int) -> bool:
        """Whether what stands before it is text that no longer changes."""
        spelling = self.spelling(token)
        return spelling.is_whole and bool(spelling.text) and self.has_text(token)


def _num_common(one: str, other: str) -> int:
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


UNKNOWN = b"\xff"  # in the place of an id that the tokenizer lacks: in no stop string's UTF-8


class StopStrings:
    """Where the first stop string begins in the text of a completion. They are found where transformers'
    `StopStringCriteria` finds them, after the same token: in what tokens spell in the midst of a text, one behind
    another, special tokens by name. So a stop string may straddle tokens, name a special token, and begin in the
    prompt, where the completion comes to nothing."""

    def __init__(self, detokenizer: Detokenizer):
        self._detokenizer = detokenizer

    def find(self, request: "Request", ids: Rows[int], *, begin: int = 0, num_new: int = 1) -> int | None:
        """Characters of the text of `ids[begin:]` before the first of the request's stop strings, None where none ends
        in the last token. To be asked after each token, or after `num_new`. With `begin` above 0 a stop string may not
        begin before it."""
        stops = [stop.encode(errors="surrogatepass") for stop in request.stop]
        longest, known = max(map(len, stops)), islice(reversed(ids), len(ids) - begin)
        prompt = self._detokenizer.prompt_ids(request) if not begin and request.stops_begin_in_prompt else ()
        pieces: list[bytes] = []  # of the new tokens and so many before that a stop string may begin in them
        num_bytes = 0
        for token in islice(chain(known, reversed(prompt)), num_new + longest - 1):  # theirs is such a window too
            spelling = self._detokenizer.spelling(token)
            pieces.append(spelling.text if spelling.is_known else UNKNOWN)
            num_bytes += len(pieces[-1]) if len(pieces) > num_new else 0
            if len(pieces) >= num_new and num_bytes >= longest - 1:
                break
        pieces.reverse()
        text = b"".join(pieces)
        num_seen = len(text) - sum(map(len, pieces[len(pieces) - min(num_new, len(ids) - begin) :]))
        places = [text.find(stop, max(0, num_seen - len(stop) + 1)) for stop in stops]
        place = min((place for place in places if place >= 0), default=None)
        if place is None:
            return None
        ends = list(accumulate(map(len, pieces)))
        index = next(index for index, end in enumerate(ends) if place < end)
        token, left = len(ids) - len(pieces) + index, pieces[index][place - ends[index] :]
        if token < begin:
            return 0
        if len(left) == len(pieces[index]) or not self._detokenizer.has_text(ids[token]):
            return len(self._detokenizer.completion_text(request, ids[:token], begin))
        text = self._detokenizer.completion_text(request, ids[: token + 1], begin)
        return max(0, len(text) - len(left.decode(errors="replace")))
